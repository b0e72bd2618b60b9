"""With a library uninstalled, exactly its cells become unavailable and everything else is as it
was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

# Distribution -> what of a cell's name tells that it needs it.
NEEDED_BY = {
    "fairscale": ("fairscale",),
    "peft": ("+lora", "+prompt", "+p_tuning", "+prefix", "+ia3"),
    "deepspeed": ("deepspeed", "tiled_linear", "zero2", "zero3"),
    "horovod": ("horovod",),
}


@pytest.fixture(scope="module")
def other_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This virtual environment once more, its files shared by hard links: pip can uninstall there
    and touch nothing here."""
    target = tmp_path_factory.mktemp("environment") / "venv"
    linked = subprocess.run(
        ["cp", "-al", sys.prefix, str(target)], capture_output=True, check=False
    )
    if linked.returncode:  # the folder of the tests is on another file system
        subprocess.run(["cp", "-a", sys.prefix, str(target)], check=True)
    return target


def planned(python: Path | str, folder: Path) -> dict[str, tuple[str, str]]:
    """Cell name -> (status, reason) of matrix full; `planned` where it would be launched."""
    command = [
        str(python),
        "-m",
        "bench",
        "run",
        "--matrix",
        "full",
        "--dry-run",
        "--json",
        "--results",
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    plan: dict[str, Any] = json.loads(done.stdout)
    from harness.spec.cell import Cell

    found = {Cell(**one).name: ("planned", "") for one in plan["cells"]}
    return found | {
        Cell(**one["cell"]).name: (one["status"], one["reason"]) for one in plan["left_out"]
    }


@pytest.fixture(scope="module")
def planned_here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    return planned(sys.executable, tmp_path_factory.mktemp("results"))


@pytest.mark.parametrize("library", NEEDED_BY)
def test_exactly_its_cells_become_unavailable(
    other_environment: Path,
    planned_here: dict[str, tuple[str, str]],
    tmp_path: Path,
    library: str,
) -> None:
    python = other_environment / "bin" / "python"
    before = planned_here
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-python-version-warning"]
    subprocess.run(
        [*pip, "uninstall", "--yes", "--quiet", library], check=True, capture_output=True
    )
    after = planned(python, tmp_path)
    # Libraries of earlier parametrisations are gone too: only what changes with this one is looked
    # at.
    lost = {
        name
        for name in before
        if any(mark in name for mark in NEEDED_BY[library]) and before[name][0] == "planned"
    }
    assert lost
    gone = list(NEEDED_BY)[: list(NEEDED_BY).index(library) + 1]
    for name in before:
        if any(mark in name for one in gone for mark in NEEDED_BY[one]):
            continue
        assert after[name] == before[name]
    for name in lost:
        status, reason = after[name]
        assert status == "unavailable"
        assert "is not installed" in reason
        assert ("make setup" if library == "horovod" else "pip install") in reason


def test_the_rest_still_trains(other_environment: Path, tmp_path: Path) -> None:
    """Without DeepSpeed and the others: a run of what is left, in the environment that lacks
    them."""
    command = [
        str(other_environment / "bin" / "python"),
        "-m",
        "bench",
        "run",
        "--matrix",
        "smoke",
        "--only",
        "ddp",
        "--trials",
        "1",
    ]
    done = subprocess.run(
        [*command, "--json", "--no-report", "--results", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {cell["status"] for cell in json.loads(done.stdout)["cells"]} == {"ok"}
