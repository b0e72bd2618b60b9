"""bench status: how far a run is, from anywhere that sees its results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def status(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[JOB|RUN]", help="SLURM job or run; the newest run where none is given."
        ),
    ] = "",
    results: Annotated[Path, typer.Option("--results", help="Folder that the run is in.")] = Path(
        "results"
    ),
    json_output: Annotated[
        bool, typer.Option("--json", help="For machines: one JSON object.")
    ] = False,
) -> None:
    """Shows how far a run is and what SLURM says of its jobs.

    Example: [bold]python -m bench status 4711[/bold]
    """
    from bench.cluster.slurm import states
    from bench.cluster.submitted import submissions
    from harness.record.store import Store
    from harness.spec.errors import UsageError

    store = Store(results)
    known = submissions(results)
    jobs = [told for told in known if name in (told["job"], told["run_id"])]
    run_id = next((told["run_id"] for told in jobs if told["run_id"]), "")
    if not run_id and name:
        run_id = name if name in store.run_ids() else _run_of_job(store, name)
    elif not run_id:
        run_id = (store.run_ids() or [""])[-1]
        jobs = [told for told in known if told["run_id"] == run_id]
    if not run_id and not jobs:
        raise UsageError(
            f"no job or run {name!r} in {str(results)!r}"
            if name
            else f"no runs in {str(results)!r}"
        )
    found = _progress(store, run_id) | {
        "jobs": [vars(one) for told in jobs for one in states(told["job"])],
        "submitted": jobs,
    }
    if json_output:
        print(json.dumps(found))
    else:
        _show(found)


def _run_of_job(store: Any, job: str) -> str:
    """A run that names the job as the one it was started in."""
    for run_id in reversed(store.run_ids()):
        text = store.run_row(run_id)["allocation"]
        if text and json.loads(text).get("job") == job:
            return str(run_id)
    return ""


def _progress(store: Any, run_id: str) -> dict[str, Any]:
    """Trials planned, recorded by status, and the newest of them."""
    from harness.record.plan import kept_plan

    if run_id not in store.run_ids():
        return {"run_id": run_id, "begun": False}
    plan = kept_plan(store, run_id)
    trials = store.load([run_id], steps=False).trials
    launched = trials[trials["position"] >= 0].sort_values("started_at")
    last = launched.groupby(["cell_id", "trial"]).tail(1)
    done = last[last["status"] != "interrupted"]
    newest = launched.iloc[-1] if len(launched) else None
    return {
        "run_id": run_id,
        "begun": True,
        "matrix": plan.matrix,
        "cells": len(plan.cells),
        "trials": len(plan.schedule()),
        "recorded": len(done),
        "left_out": len(plan.left_out),
        "statuses": {str(k): int(v) for k, v in last["status"].value_counts().items()},
        "newest": (
            None
            if newest is None
            else f"{newest['cell_name']} trial {newest['trial']}: {newest['status']}"
        ),
        "newest_at": None if newest is None else newest["started_at"].isoformat(),
    }


def _show(found: dict[str, Any]) -> None:
    from rich.markup import escape

    from bench.cli import terminal

    console = terminal.console()
    if not found["begun"]:
        console.print(f"run {found['run_id'] or '(not named yet)'} has not begun")
    else:
        said = (
            ", ".join(f"{count} {status}" for status, count in found["statuses"].items())
            or "nothing recorded yet"
        )
        far = f"{found['recorded']} of {found['trials']} trials"
        console.print(f"run {found['run_id']} of matrix {escape(found['matrix'])}: {far} ({said})")
        if found["newest"]:
            console.print(f"newest: {escape(found['newest'])}")
    for job in found["jobs"]:
        where = f" on {job['nodes']}" if job["nodes"] else ""
        why = f" ({job['reason']})" if job["reason"] else ""
        again = f", begun anew {job['restarts']} times" if job["restarts"] else ""
        console.print(f"job {job['job_id']}: {job['state']}{why}{where}, {job['elapsed']}{again}")
    if found["submitted"] and not found["jobs"]:
        console.print("SLURM does not know its jobs any more")
