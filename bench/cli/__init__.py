"""The command line: one small file per command, heavy imports inside the functions."""

from __future__ import annotations

import sys

import typer

from bench.cli.compare import compare
from bench.cli.doctor import doctor
from bench.cli.export import export
from bench.cli.history import history
from bench.cli.list_cmd import listing
from bench.cli.maxsize import maxsize
from bench.cli.profile import profile
from bench.cli.publish import publish
from bench.cli.remedies import with_remedy
from bench.cli.report import report
from bench.cli.run import run
from bench.cli.show import cell
from bench.cli.status import status
from bench.cli.submit import submit
from harness.spec.errors import UsageError

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
app.command("run")(run)
app.command("list")(listing)
app.command("doctor")(doctor)
app.command("report")(report)
app.command("show")(cell)
app.command("maxsize")(maxsize)
app.command("export")(export)
app.command("publish")(publish)
app.command("profile")(profile)
app.command("compare")(compare)
app.command("history")(history)
app.command("submit")(submit)
app.command("status")(status)


def main() -> None:
    """Runs a command; a user's mistake becomes one sentence on stderr and exit code 2."""
    try:
        app(prog_name="python -m bench")
    except UsageError as error:
        print(f"bench: {with_remedy(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        sys.exit(130)
