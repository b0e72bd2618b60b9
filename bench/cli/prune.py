from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bench.cli.options import DryRun, Json, Results
from harness.cell.errors import plural


def prune(
    keep: Annotated[
        int, typer.Option("--keep", min=1, help="Number of newest runs to keep of each matrix.")
    ],
    results: Results = Path("results"),
    dry_run: DryRun = False,
    json_output: Json = False,
) -> None:
    """Remove old runs of a results folder, but no run that a night is compared with.

    Example: [bold]python -m bench prune --keep 60 --dry-run[/bold]
    """
    from harness.record.plan import matrix_name
    from harness.record.store import Store

    store = Store(results)
    standards = {
        run_id
        for file in (results / "slurm" / "nightly").glob("*/last-good")
        for run_id in file.read_text().split()
    }
    newer: dict[str, int] = {}
    old = []
    for row in store.newest_rows():
        matrix, run_id = matrix_name(row["matrix"]), str(row["run_id"])
        newer[matrix] = newer.get(matrix, 0) + 1
        if newer[matrix] > keep and run_id not in standards:
            old.append(run_id)
    for run_id in () if dry_run else old:
        store.remove(run_id)
    if json_output:
        print(json.dumps({"removed": old, "dry_run": dry_run}))
    else:
        print(f"{'would remove' if dry_run else 'removed'} {plural(len(old), 'run')}")
