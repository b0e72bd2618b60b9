"""Messages say what is wrong and what would be right; only the command line names its options."""

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
from harness.cell.errors import UsageError
from harness.record.plan import resumable
from harness.record.store import Store

ROOT = Path(__file__).parents[2]
PACKAGES = ("bench", "harness", "reports")


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


ERRORS = {"UsageError", "Refused", "Unavailable", "OtherSchema", "DamagedRun", "NothingToResume"}
"""Errors whose message is all that a user sees. REMEDIES completes the others."""
NEXT_STEP = (
    r"\b(?:add|at least|at most|choose|combine|continue|give|have|has|install|keep|leave|list|make"
    r"|measure|must|name|needs?|only|reinstall|remove|run|see|set|submit|too (?:few|many)|try|turn"
    r"|use|wait|write)\b"
)
CONTRAST = (
    r"\b(?:than|expected|lacks?|outside|matches no|cannot \w+|there is no|not (?:an?|divi\w+|for|in"
    r"|on)|(?:do|goals|ranks) are)\b"
)
CAUSE = r"[:;,(] ?\{\}|option \{\}$|^\{\} \{\}$"
"""The last word has another program, the system, or a sentence made elsewhere."""


def refusals(tree: ast.AST) -> Iterator[str]:
    """Yields messages of user's mistakes, with `{}` for values."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in ERRORS:
            continue
        if node.args and isinstance(node.args[0], ast.JoinedStr):
            parts = node.args[0].values
            yield "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in parts)
        elif node.args and isinstance(node.args[0], ast.Constant):
            yield str(node.args[0].value)


def helps(message: str) -> bool:
    """Whether the message is one sentence that says what to do, or what would be right."""
    whole = not message.endswith((".", "!")) and "\n" not in message
    return whole and bool(re.search(f"{NEXT_STEP}|{CONTRAST}|{CAUSE}", message))


@pytest.mark.parametrize(
    ("message", "good"),
    [
        ("bad value", False),
        ("the cell is refused", False),
        ("--trials {}: give a whole number of at least 1.", False),
        ("--trials {}: give a whole number of at least 1", True),
        ("{} runs on {} device, not on {}", True),
    ],
)
def test_a_message_without_a_next_step_is_found(message: str, good: bool) -> None:
    assert helps(message) == good


def test_every_refusal_has_a_next_step_or_names_what_would_be_right() -> None:
    files = [file for folder in PACKAGES for file in sorted((ROOT / folder).rglob("*.py"))]
    said = {message: file for file in files for message in refusals(ast.parse(file.read_text()))}
    assert len(said) > 300
    assert {message: file.name for message, file in said.items() if not helps(message)} == {}


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
