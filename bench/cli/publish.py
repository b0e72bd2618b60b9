"""bench publish: results for TensorBoard, MLflow or Prometheus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from bench.cli.options import JsonObject, ResultsRead


def publish(
    target: Annotated[
        Literal["tensorboard", "mlflow", "prometheus"],
        typer.Argument(
            metavar="TARGET",
            help="Tool that is to read the results.",
        ),
    ],
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder that the tool reads; made where it is missing."),
    ],
    run: Annotated[
        list[str] | None,
        typer.Argument(
            help="Runs: id, its first letters, latest, latest~1; by default the newest."
        ),
    ] = None,
    results: ResultsRead = Path("results"),
    every: Annotated[
        bool, typer.Option("--all", help="All runs of the folder (tensorboard, mlflow).")
    ] = False,
    json_output: JsonObject = False,
) -> None:
    """Writes TensorBoard event files, an MLflow file store or a Prometheus textfile. Skips what is
    already there.

    Example: [bold]python -m bench publish tensorboard runs/ --all[/bold]
    """
    from bench.select import find_runs
    from harness.record.store import Store
    from reports.publish import need
    from reports.publish import publish as write

    need(target)
    store = Store(results)
    run_ids = find_runs(store, run or [], every)
    done = write(target, store.load(run_ids, steps=target == "tensorboard"), folder)
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
    already = f", {done.already} were there already" if done.already else ""
    print(f"{done.path}: {done.cells} cells written{already}")
