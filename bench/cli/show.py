from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bench.cli import options as opt


def show(
    which: opt.Cell,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            help="Run: an id or its prefix, latest, latest~1; by default the newest with the cell.",
        ),
    ] = None,
    results: opt.Results = Path("results"),
    json_output: opt.Json = False,
) -> None:
    """Show one cell: trials, steps, memory, where time goes, parity.

    Example: [bold]python -m bench show 'ddp llama-micro x2 fp32*'[/bold]
    """
    from bench.cli import terminal
    from bench.select import find_recorded_cell, find_run
    from harness.record.store import Store
    from reports.cell_detail import in_full

    store = Store(results)
    tables, cell_id = find_recorded_cell(store, which, find_run(store, run) if run else None)
    detail = in_full(tables, store.steps_of(str(tables.runs["run_id"].iloc[0]), cell_id), cell_id)
    if json_output:
        print(json.dumps(detail.as_json(), allow_nan=False))
        return
    out = terminal.console()
    terminal.write(out, detail.blocks())
    if detail.profiled is None:
        out.print("not profiled in this run: use bench run --profile, or: python -m bench profile")
