"""Adding a strategy in a user's own package, in a fresh virtual environment.

Files and commands are those of the documents, unchanged.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from harness.record.store import load
from tests import pages

README, PAGE = pages.ROOT / "README.md", pages.ROOT / "docs" / "extending.md"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pages.checkout(tmp_path_factory.mktemp("walk"))


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns variables in which `python` is that of a fresh virtual environment.

    The libraries installed here are visible in it, so nothing is downloaded. This suite and other
    tests' strategies are not.
    """
    home = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = home / "lib" / version / "site-packages"
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "200"}


def run(command: str, folder: Path, variables: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_the_readme_leads_to_the_page() -> None:
    assert "](docs/extending.md)" in README.read_text()


@pytest.mark.thorough
def test_a_users_own_strategy(checkout: Path, variables: dict[str, str]) -> None:
    said = {}
    for block in pages.blocks(pages.section(PAGE, "A strategy")):
        if block.path:
            block.apply(checkout)
        for command in block.commands:
            said[" ".join(command.split()[2:5])] = run(command, checkout, variables)
    assert "averages gradients as one flat tensor" in said["bench list strategies"].lower()
    assert "exact" in said["bench show 'flat_average(pieces=4)'"]
    assert r"flat\_average(pieces=4)" in said["bench report --format"]
    trials = load(checkout / "results").trials
    assert set(trials["label"]) == {"ddp", "flat_average", "flat_average(pieces=4)"}
    assert (trials.groupby("label").size() >= 2).all(), "candidates for the fastest run again"
    assert set(trials["status"]) == {"ok"}, trials["log_tail"].tolist()
    assert set(trials["parity_verdict"]) == {"exact"}
    assert len(list((checkout / "reports" / "html").glob("*.html"))) == 1
