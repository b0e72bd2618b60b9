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
            help="Run, by its id or a prefix of it, latest, or latest~1; by default the newest with"
            " the cell.",
        ),
    ] = None,
    results: opt.Results = Path("results"),
    json_output: opt.Json = False,
) -> None:
    """Show one cell: trials, steps, memory, where time goes, parity.

    Example: [bold]python -m bench show 'ddp llama-micro x2 fp32*'[/bold]
    """
    from bench.cli import terminal
    from bench.select import find_recorded_cells, find_run, of_several
    from harness.record.store import Store
    from reports.cell_detail import in_full

    store = Store(results)
    tables, cells = find_recorded_cells(store, which, find_run(store, run) if run else None)
    cell_id, *others = (cell.cell_id for cell in cells)
    detail = in_full(tables, store.steps_of(str(tables.runs["run_id"].iloc[0]), cell_id), cell_id)
    if json_output:
        print(json.dumps(detail.as_json() | {"others": others}, allow_nan=False))
        return
    out = terminal.console()
    if several := of_several(which, len(cells)):
        out.print(several, markup=False)
    terminal.write(out, detail.blocks())
    if detail.profiled is None:
        out.print("not profiled in this run: use bench run --profile, or: python -m bench profile")
