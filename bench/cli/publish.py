from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from bench.cli.options import AllRuns, Json, Results, Runs
from harness.cell.errors import plural


def publish(
    target: Annotated[
        Literal["mlflow", "wandb", "prometheus"],
        typer.Argument(metavar="TARGET", help="Tool that reads the results."),
    ],
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder that the tool reads; created if missing."),
    ],
    run: Runs = None,
    results: Results = Path("results"),
    every: AllRuns = False,
    json_output: Json = False,
) -> None:
    """Write results for MLflow, W&B or Prometheus.

    Skips results already there, but replaces Prometheus's file.

    Example: [bold]python -m bench publish mlflow runs/ --all[/bold]
    """
    from bench.select import find_runs
    from harness.record.store import Store
    from reports.publish import need
    from reports.publish import publish as write

    need(target)
    store = Store(results)
    run_ids = find_runs(store, run or [], every)
    done = write(target, store.load(run_ids, steps=False), folder)
    if json_output:
        print(
            json.dumps(
                {
                    "target": target,
                    "path": str(done.path),
                    "runs": run_ids,
                    "cells": done.cells,
                    "already_there": done.already,
                }
            )
        )
        return
    already = f", {done.already} already there" if done.already else ""
    print(f"{done.path}: {plural(done.cells, 'cell')} written{already}")
