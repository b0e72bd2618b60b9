"""The examples of docs/extending.md, in a copy of this checkout: their files and patches are
applied, their commands run, and they touch as many files as the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.record.schema import VERSION
from harness.record.store import load
from tests import pages

PAGE = pages.ROOT / "docs" / "extending.md"
OUTPUT = {
    "A family of workloads": ["mistral-small", "2 passed", "pipeline(schedule="],
    "A measured column": [f"golden/v{VERSION + 1}", "passed", "True"],
    "A section of the report": ["starting.html", "## Set-up", "passed"],
    "A command": ["Lists the runs of a results folder", "20261121T111409-a855  full", "passed"],
}
"""What the commands of each example print, beside much else."""


def run(command: str, folder: Path) -> str:
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=kept | {"PATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def stated_files() -> dict[str, int]:
    """How many files each example touches, by its heading in lower case."""
    rows = re.findall(r"^\| \[(.*?)\]\(.*?\) \| (\d+)", PAGE.read_text(), flags=re.M)
    return {heading: int(number) for heading, number in rows}


def test_every_example_is_in_the_table_and_is_tested() -> None:
    headings = re.findall(r"^## (.*)", PAGE.read_text(), flags=re.M)
    assert [heading.lower() for heading in headings] == list(stated_files())
    assert {"A strategy", *OUTPUT} == set(headings)


@pytest.mark.parametrize("heading", OUTPUT)
def test_an_example_works_and_touches_as_many_files_as_it_says(
    heading: str, tmp_path: Path
) -> None:
    copy, output, touched = pages.checkout(tmp_path), "", set()
    for block in pages.blocks(pages.section(PAGE, heading)):
        if block.path:
            block.apply(copy)
            touched.add(block.path)
        output += "".join(run(command, copy) for command in block.commands)
    for text in OUTPUT[heading]:
        assert text in output
    assert len(touched - {"README.md"}) == stated_files()[heading.lower()]
    python = [path for path in sorted(touched) if path.endswith(".py")]
    run(f"python -m ruff check {' '.join(python)}", copy)
    run(f"python -m ruff format --check {' '.join(python)}", copy)
    if (copy / "results" / "trials").exists():
        trials = load(copy / "results").trials
        assert set(trials["status"]) == {"ok"}, trials["log_tail"].tolist()
        assert set(trials["parity_verdict"]) == {"exact"}


def test_a_strategy_needs_no_more_than_its_file(tmp_path: Path) -> None:
    copy = pages.checkout(tmp_path)
    (block,) = (
        b for b in pages.blocks(pages.section(PAGE, "A strategy")) if b.language == "python"
    )
    (copy / "harness" / "strategies" / "flat_average.py").write_text(block.text)
    assert '"flat_average"' in run("python -m bench list strategies --json", copy)
    run("python -m ruff format --check harness/strategies", copy)
