"""A command of the command line, asked as a user asks it."""

from __future__ import annotations

from collections.abc import Callable

import typer
from typer.testing import CliRunner


def ask(command: Callable[..., None], *words: str) -> tuple[int, str]:
    """Exit code and standard output; an error of ours is raised."""
    app = typer.Typer()
    app.command()(command)
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    return done.exit_code, done.stdout


def told(command: Callable[..., None], *words: str) -> str:
    """The standard output of a command that ends well."""
    code, said = ask(command, *words)
    assert code == 0
    return said
