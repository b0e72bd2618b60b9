from __future__ import annotations

import typer

from bench.run_options import CommandOptions, command


@command
def run(options: CommandOptions) -> None:
    """Train every cell of a matrix, verify it, and write a report.

    Example: [bold]python -m bench run --matrix full --skip three_d --set batch=16[/bold]
    """
    from bench.cli.run_matrix import run_matrix

    raise typer.Exit(run_matrix(options))
