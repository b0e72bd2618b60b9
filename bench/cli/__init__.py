"""The command line: one file per command, heavy imports inside the functions."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from importlib import import_module

import typer

from bench.cli.remedies import refusal
from harness.host.imports import collect_seldom
from harness.spec.errors import DamagedFileWarning, UsageError

COMMANDS = {
    "run": "run:run",
    "list": "list_cmd:listing",
    "doctor": "doctor:doctor",
    "report": "report:report",
    "show": "show:show",
    "maxsize": "maxsize:maxsize",
    "plan": "plan:plan",
    "validate": "validate:validate",
    "calibrate": "validate:calibrate",
    "whatif": "whatif:whatif",
    "export": "export:export",
    "publish": "publish:publish",
    "check": "check:check",
    "profile": "profile:profile",
    "rehearse": "rehearse:rehearse",
    "compare": "compare:compare",
    "history": "history:history",
    "submit": "submit:submit",
    "status": "status:status",
}
"""Module and function of each command, in the order of the help."""

app = typer.Typer(
    name="bench",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help=(
        "Trains an identical model on an identical dataset under every PyTorch parallelism"
        " strategy, verifies that each trained the same thing, and records how fast and in how much"
        " memory. Start with: [bold]python -m bench run --matrix smoke[/bold]"
    ),
)
for command, place in COMMANDS.items():
    module, _, function = place.partition(":")
    app.command(command)(getattr(import_module(f"bench.cli.{module}"), function))


def _show_warning(
    otherwise: Callable[..., None], message: Warning | str, kind: type[Warning], *where: object
) -> None:
    """Shows a warning about damaged files without its source line."""
    if issubclass(kind, DamagedFileWarning):
        print(f"bench: {message}", file=sys.stderr)
    else:
        otherwise(message, kind, *where)


def main() -> None:
    """Runs a command. A user's mistake, or a file that the system refuses, becomes one sentence on
    stderr and exit code 2."""
    collect_seldom()
    warnings.showwarning = functools.partial(_show_warning, warnings.showwarning)
    try:
        app(prog_name="python -m bench")
    except (UsageError, OSError) as error:
        if not (sentence := refusal(error)):
            raise
        print(f"bench: {sentence}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        sys.exit(130)
