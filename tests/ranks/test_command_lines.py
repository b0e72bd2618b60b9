"""Every command line of the documents and of `--help` runs, in a folder as a user has it.

Commands that read results read the kept run. A run is planned but not made, and a search for a
size is stopped before its first trial.
"""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

from harness.run.maxsize import Search
from tests.command_lines import (
    ROOT,
    CommandLine,
    command_line,
    of_document,
    of_help,
    of_makefile,
    user_folder,
)
from tests.unit.test_cli import here

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "slurm/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
ELSEWHERE = {"docs/extending.md"}
"""Pages whose commands need the page's files: test_extending.py runs them with these."""
WITHOUT_DATA = re.compile(r"has no data for it|matches no label|GiB of this host")
"""Answers about cells of another matrix than the kept run's, or from a host that is too small."""
ASKING_MORE = re.compile(r"--section (?:checkpoints|effects|experts)|checkpoint=|8GiB")
SLOW = re.compile(
    r"publish (?!prometheus)|^site|doctor --(?:links|probes)|rehearse|profile (?!ddp$)"
    r"|maxsize --grow|^report .*(?:--open|--each|results/|2026)"
)
"""Commands that take more than a few seconds."""
MARKS = {"quick", "thorough", "not thorough"}


def commands() -> dict[CommandLine, str]:
    """Returns each command line once, with its first source."""
    found: list[tuple[str, CommandLine]] = []
    for file in DOCUMENTS:
        if (name := str(file.relative_to(ROOT))) not in ELSEWHERE:
            found += [(name, line) for line in of_document(file.read_text())]
    found += [("--help", line) for line in of_help()]
    found += [("Makefile", line) for line in map(command_line, of_makefile()) if line]
    return {line: name for name, line in reversed(found)}


LINES = commands()
TARGETS = sorted({line.words[1] for line in LINES if line.words[0] == "make"})


def parameters() -> list[object]:
    once = {tuple(line.arguments): line for line in LINES if line.words[0] != "make"}
    return [
        pytest.param(
            line,
            id=f"{LINES[line]}: {line.text}",
            marks=[pytest.mark.thorough] if SLOW.search(" ".join(line.words)) else [],
        )
        for line in once.values()
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return user_folder(tmp_path_factory.mktemp("user"))


@pytest.mark.parametrize("line", parameters())
def test_a_command_line_runs(
    line: CommandLine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(typer, "launch", lambda address: 0)
    monkeypatch.setattr(Search, "run", lambda search, *_: False)
    monkeypatch.setenv("PARALLELISM_BENCH_KEY", "00" * 32)
    if line.words == ("maxsize", "--resume"):
        small = ("--budget", "96MiB", "--hidden", "128", "--only", "single")
        assert here("maxsize", *small, "--results", "searches", folder=folder).returncode == 130
    done = here(*line.arguments, folder=folder)
    if done.returncode == 2 and ASKING_MORE.search(line.text):
        assert WITHOUT_DATA.search(done.stderr), done.stderr
        return
    assert done.returncode in line.endings, done.stderr
    assert done.stdout or done.stderr


def test_documents_and_help_have_command_lines() -> None:
    assert len(LINES) > 120
    assert {"README.md", "AGENTS.md", "slurm/README.md", "docs/compare.md"} <= set(LINES.values())
    assert "make" in {line.words[0] for line in LINES}


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_of_make_calls_what_exists(target: str) -> None:
    """Commands of the suite in the Makefile run like the documents' above."""
    for line in of_makefile(target):
        words = shlex.split(line.replace(";", " "))
        programs = [word for word in words if word.startswith("scripts/")]
        modules = [words[i + 1] for i, word in enumerate(words) if word == "-m"]
        files = [word for word in words if word.startswith("tests/")]
        assert programs or modules or line.startswith((".venv/bin/lint-imports", "if [")), line
        assert all((ROOT / file).exists() for file in programs + files), line
        assert all(find_spec(module) for module in modules if module not in MARKS), line
