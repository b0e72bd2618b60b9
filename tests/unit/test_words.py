"""Only the command-line layer names commands and options; lower layers say what is wrong."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from bench.cli import REMEDIES, app, with_remedy
from harness.record.plan import resumable
from harness.record.store import Store
from harness.spec.errors import UsageError

ROOT = Path(__file__).parents[2]


def commands(command: Any) -> Iterator[Any]:
    """Yields the command, or all commands of a group at any depth."""
    if isinstance(command, TyperGroup):
        for part in command.commands.values():
            yield from commands(part)
    else:
        yield command


OWN_COMMAND = "harness/nodes/agent.py"
"""`python -m harness.agent` has its own options."""
OPTIONS = {
    option
    for command in commands(typer.main.get_command(app))
    for parameter in command.params
    for option in parameter.opts
    if option.startswith("--")
}
WORDS = re.compile(rf"python -m bench|(?:{'|'.join(sorted(OPTIONS))})(?![\w-])")


def texts(source: str) -> Iterator[str]:
    """Yields a module's string literals that users may read: no docstrings, and no single words,
    which are arguments of other programs."""
    tree = ast.parse(source)
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in bare
            and " " in node.value.strip()
        ):
            yield node.value


def naming_texts(file: Path) -> list[str]:
    """Returns a file's texts that name a command or an option."""
    return [text for text in texts(file.read_text()) if WORDS.search(text)]


def test_a_word_of_the_command_line_is_seen() -> None:
    assert {"--resume", "--out", "--matrix"} <= OPTIONS
    source = '"""Docstring: --out"""\nx = "--out"\ny = f"give --out {x}"\nz = "see --outer space"\n'
    assert [text for text in texts(source) if WORDS.search(text)] == ["give --out "]


@pytest.mark.parametrize("folder", ["harness", "reports"])
def test_nothing_below_the_command_line_names_its_commands_or_options(folder: str) -> None:
    files = {str(file.relative_to(ROOT)): file for file in (ROOT / folder).rglob("*.py")}
    named = {name: lines for name, file in files.items() if (lines := naming_texts(file))}
    assert named.keys() <= {OWN_COMMAND}, named


def test_the_command_line_says_what_helps(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store, nowhere = Store(tmp_path), Store(tmp_path / "file" / "results")
    for ask, remedy in (
        (store.load, "no runs in results folder {}; make one with: python -m bench run"),
        (lambda: resumable(store, None), "nothing to resume in {}: no run; leave --resume out"),
        (nowhere.require_writable, "results folder {} cannot be written; choose another with --"),
    ):
        with pytest.raises(UsageError) as error:
            ask()
        folder = nowhere.folder if "written" in remedy else store.folder
        assert type(error.value) in REMEDIES
        assert with_remedy(error.value).startswith(remedy.format(repr(str(folder))))
    assert with_remedy(UsageError("unchanged")) == "unchanged"
