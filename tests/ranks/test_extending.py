"""The examples of docs/extending.md work in a copy of this checkout.

Their files and patches are applied, their commands run, and they touch as many files as the page
states.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests import pages

PAGE = pages.ROOT / "docs" / "extending.md"
OUTPUT = {
    "A family of workloads": ["mistral-small", "pipeline(schedule="],
    "A measured column": ["passed", "True"],
    "An axis": ["ddp(denormals=flushed)"],
    "A section of the report": ["starting.html", "## Set-up"],
    "A command": ["List the runs of a results folder", "20261128T064652-090b  full"],
}
"""Texts that the commands of each example print, among others."""
TESTS = re.compile(r"python -m pytest (\S+) -k (\w+)")
"""Command that runs tests, with their file and a word of their names."""
SAME_RUN = "python -m bench run --matrix smoke --only ddp --trials 1"
"""Run of the measured column, covered by the family's run, to which the column is also applied."""


def run(command: str, folder: Path) -> str:
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=inherited | {"PATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def stated_files() -> dict[str, int]:
    """Returns how many files each example touches, by its lower-case heading."""
    rows = re.findall(r"^\| \[(.*?)\]\(.*?\) \| (\d+)", PAGE.read_text(), flags=re.M)
    return {heading: int(number) for heading, number in rows}


def test_every_example_is_in_the_table_and_is_tested() -> None:
    headings = re.findall(r"^## (.*)", PAGE.read_text(), flags=re.M)
    assert [heading.lower() for heading in headings] == list(stated_files())
    assert {"A strategy", *OUTPUT} == set(headings)


@pytest.mark.thorough
def test_the_examples_work_and_touch_as_many_files_as_they_say(tmp_path: Path) -> None:
    """All examples share one copy and a run, and their tests share a process."""
    copy = pages.checkout(tmp_path)
    examples = {heading: pages.blocks(pages.section(PAGE, heading)) for heading in OUTPUT}
    python = set()
    for heading, blocks in examples.items():
        for block in blocks:
            if block.path:
                block.apply(copy)
        touched = {block.path for block in blocks if block.path}
        assert len(touched - {"docs/README.md"}) == stated_files()[heading.lower()]
        python |= {path for path in touched if path.endswith(".py")}
    tests: dict[str, str] = {}
    for heading, blocks in examples.items():
        output = ""
        for command in (command for block in blocks for command in block.commands):
            if found := TESTS.fullmatch(command):
                tests[found[1]] = found[2]
            elif command != SAME_RUN:
                output += run(command, copy)
        for text in OUTPUT[heading]:
            assert text in output
    assert len(tests) == 4
    said = run(f"python -m pytest -vv {' '.join(tests)} -k '{' or '.join(tests.values())}'", copy)
    passed = [line for line in said.splitlines() if "PASSED" in line]
    for file, word in tests.items():
        assert [line for line in passed if file in line and word in line], said
    assert sum("mistral" in line for line in passed) == 2
    files = " ".join(sorted(python))
    run(f"python -m ruff check {files} && python -m ruff format --check {files}", copy)
    # The copy's schema has one column that this process lacks.
    files_of_trials = (copy / "results" / "trials").rglob("*.parquet")
    trials = pd.concat(pd.read_parquet(file) for file in files_of_trials)
    assert list(trials["status"]) == ["ok"] * 3, trials["log_tail"].tolist()
    assert list(trials["parity_verdict"]) == ["exact"] * 3
    assert sorted(trials["denormals"]) == ["flushed", "flushed", "kept"]


def test_a_strategy_needs_no_more_than_its_file(tmp_path: Path) -> None:
    copy = pages.checkout(tmp_path)
    (block,) = (
        b for b in pages.blocks(pages.section(PAGE, "A strategy")) if b.language == "python"
    )
    (copy / "harness" / "strategies" / "flat_average.py").write_text(block.text)
    assert '"flat_average"' in run("python -m bench list strategies --json", copy)
    run("python -m ruff format --check harness/strategies", copy)
