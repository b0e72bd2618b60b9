"""The command line: one file per command, with heavy imports inside functions."""

from __future__ import annotations

import errno
import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import typer

from harness.cell.errors import (
    DamagedFileWarning,
    DamagedRun,
    NoRuns,
    NothingToResume,
    NotRecorded,
    NotWritable,
    UnknownModel,
    UsageError,
)
from harness.host.gc_tuning import collect_seldom
from harness.host.packages import TRAINING, require

COMMANDS = {
    "Measure and compare": {
        "run": "run:run",
        "report": "report:report",
        "show": "show:show",
        "compare": "compare:compare",
        "bisect": "bisect:bisect",
        "profile": "profile:profile",
        "maxsize": "maxsize:maxsize",
    },
    "Look up": {
        "list": "list_cmd:listing",
        "schema": "list_cmd:schema",
        "doctor": "doctor:doctor",
        "check": "check:check",
    },
    "Predict": {
        "fits": "fits:fits",
        "plan": "plan:plan",
        "rehearse": "rehearse:rehearse",
    },
    "Use elsewhere": {
        "export": "export:export",
        "publish": "publish:publish",
        "site": "report:site",
        "submit": "slurm:submit",
        "status": "slurm:status",
        "night": "night:night",
        "prune": "prune:prune",
    },
}
"""Module and function of each command by panel, in order of the help."""

TRAINING_COMMANDS = {"run", "profile", "maxsize", "rehearse", "export"}
"""Commands that need torch and transformers."""
SCRIPT = "parallelism-bench"
"""Console script; shells complete it, but not `python -m bench`."""
PROGRAM = SCRIPT if Path(sys.argv[0]).stem == SCRIPT else "python -m bench"

REMEDIES: dict[type[UsageError], str] = {
    DamagedRun: "find the damage with: python -m bench check RESULTS",
    NoRuns: "make one with: python -m bench run --matrix smoke",
    NothingToResume: "leave --resume out to start one",
    NotRecorded: (
        "earlier results are kept: fix this, then continue with python -m bench run --resume"
    ),
    NotWritable: "choose another with --results DIR",
    UnknownModel: "see the names with: python -m bench list models",
}

app = typer.Typer(
    name="bench",
    no_args_is_help=True,
    add_completion=PROGRAM == SCRIPT,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help=(
        "Trains an identical model on an identical dataset under every PyTorch parallelism"
        " strategy, verifies that all of them train the same thing, and records throughput and"
        " memory. Start with: [bold]python -m bench run --matrix smoke[/bold]"
    ),
)


def _with_training_packages(run: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(run)
    def checked(*args: object, **options: object) -> None:
        require(TRAINING)
        run(*args, **options)

    return checked


def _register() -> None:
    for panel, commands in COMMANDS.items():
        for command, module_path in commands.items():
            module, _, function = module_path.partition(":")
            run = getattr(import_module(f"bench.cli.{module}"), function)
            # Join the docstring's lines: Typer keeps its line breaks, which look wrong at any width
            # but the docstring's.
            paragraphs = inspect.cleandoc(run.__doc__ or "").split("\n\n")
            text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
            run = _with_training_packages(run) if command in TRAINING_COMMANDS else run
            app.command(command, help=text, rich_help_panel=panel)(run)


_register()


def refusal(error: Exception) -> str:
    """Returns the message for a mistake or an unusable file; else empty."""
    if isinstance(error, UsageError):
        return with_remedy(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{str(error.filename)!r} cannot be used: {error.strerror}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO):
        return f"the output cannot be written: {error.strerror}"
    return "a file that was read is too deeply nested" if isinstance(error, RecursionError) else ""


def with_remedy(error: UsageError) -> str:
    remedy = REMEDIES.get(type(error))
    return f"{error}; {remedy}" if remedy else str(error)


def _show_warning(
    otherwise: Callable[..., None], message: Warning | str, kind: type[Warning], *where: object
) -> None:
    if issubclass(kind, DamagedFileWarning):
        print(f"bench: {message}", file=sys.stderr)
    else:
        otherwise(message, kind, *where)


def main() -> None:
    """Runs a command. Mistakes and unusable files print a message to stderr and exit with 2."""
    collect_seldom()
    warnings.showwarning = functools.partial(_show_warning, warnings.showwarning)
    try:
        try:
            app(prog_name=PROGRAM)
        finally:
            sys.stdout.flush()
    except (UsageError, OSError, RecursionError) as error:
        if not (sentence := refusal(error)):
            raise
        print(f"bench: {sentence}", file=sys.stderr)
        if isinstance(error, OSError):  # what is left in the buffer would fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(2)
