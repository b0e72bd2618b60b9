"""If libraries are uninstalled, exactly their cells become unavailable, each with its reason.

All other cells are unchanged and still train.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.cli.run import run
from harness.cell.cell import Cell
from tests.commands import told
from tests.conftest import ROOT

# Distribution -> parts of the names of cells that need it.
NEEDED_BY = {
    "fairscale": ("fairscale",),
    "peft": ("+lora", "+prompt", "+p_tuning", "+prefix", "+ia3"),
    "deepspeed": ("deepspeed", "tiled_linear", "ulysses", "zero2", "zero3"),
    "horovod": ("horovod",),
}


@pytest.fixture
def other_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a hard-linked copy of this virtual environment, where pip can uninstall safely.

    Links to an environment are resolved first. Otherwise the link would be copied, and pip would
    uninstall from the original.
    """
    here = Path(sys.prefix).resolve()
    target = tmp_path_factory.mktemp("environment") / "venv"
    linked = subprocess.run(["cp", "-al", str(here), str(target)], capture_output=True, check=False)
    if linked.returncode:  # the tests' folder is on another file system
        subprocess.run(["cp", "-a", str(here), str(target)], check=True)
    packages = sorted(target.glob("lib/python3*/site-packages"))
    assert packages
    for copy in (target, *packages):
        assert not copy.resolve().is_relative_to(here)
    return target


WORDS = ["--matrix", "full", "--dry-run", "--json", "--results"]


def cells(said: str) -> dict[str, tuple[str, str]]:
    """Returns each cell's status and reason in a dry run, by name; `planned` if it would be
    launched."""
    plan: dict[str, Any] = json.loads(said)
    planned = {Cell(**one).name: ("planned", "") for one in plan["cells"]}
    return planned | {
        Cell(**one["cell"]).name: (one["status"], one["reason"]) for one in plan["left_out"]
    }


@pytest.mark.thorough
def test_exactly_their_cells_become_unavailable_and_the_rest_still_trains(
    other_environment: Path, tmp_path: Path
) -> None:
    before = cells(told(run, *WORDS, str(tmp_path)))
    python = str(other_environment / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-python-version-warning"]
    subprocess.run(
        [*pip, "uninstall", "--yes", "--quiet", *NEEDED_BY], check=True, capture_output=True
    )
    bench = [python, "-m", "bench", "run"]
    done = subprocess.run(
        [*bench, *WORDS, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    after = cells(done.stdout)
    needed = {
        name: {library for library in NEEDED_BY for mark in NEEDED_BY[library] if mark in name}
        for name in before
    }
    for library in NEEDED_BY:
        lost = [name for name in before if library in needed[name] and before[name][0] == "planned"]
        assert lost
        for name in lost:
            status, reason = after[name]
            assert status == "unavailable"
            missing = reason.partition(" is not installed")[0].split()[-1].lower()
            assert missing in needed[name], reason
            assert ("make setup" if missing == "horovod" else "pip install") in reason
    for name in before:
        if not needed[name]:
            assert after[name] == before[name]

    matrix = tmp_path / "rest.yaml"
    matrix.write_text(
        "trials: 1\ntimed_seconds: 0\n"
        "defaults: {workload: llama-nano, sequence_length: 32, timed_steps: 3}\n"
        "cells: [{strategy: ddp, devices: 2}]"
    )
    done = subprocess.run(
        [*bench, "--matrix", str(matrix), "--json", "--no-report", "--results", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {cell["status"] for cell in json.loads(done.stdout)["cells"]} == {"ok"}
