from __future__ import annotations

import typer

from bench.run_options import CommandOptions, command


@command
def run(options: CommandOptions) -> None:
    """Train every cell of a matrix, verify it, and write a report.

    --dry-run lists the cells and why others are left out, and takes seconds.

    Example: [bold]python -m bench run --matrix full --dry-run[/bold]

    Example: [bold]python -m bench run --matrix quick --model gpt2-mini --set batch=16[/bold]

    Example: [bold]python -m bench run --resume[/bold]
    """
    from bench.cli.run_matrix import run_matrix

    raise typer.Exit(run_matrix(options))
