"""Invokes commands like a user does."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import typer
from typer.testing import CliRunner


def needs_horovod() -> None:
    """Skips the test where Horovod is missing, which only `make setup` builds."""
    if find_spec("horovod") is None:
        pytest.skip("make setup builds Horovod")


def ask(command: Callable[..., None], *words: str) -> tuple[int, str]:
    """Returns exit code and standard output; raises the command's errors."""
    app = typer.Typer()
    app.command()(command)
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    return done.exit_code, done.stdout


def told(command: Callable[..., None], *words: str) -> str:
    """Returns the standard output of a command, which must succeed."""
    code, output = ask(command, *words)
    assert code == 0
    return output
