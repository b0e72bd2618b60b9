"""bench status: how far along a run is."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli.options import JsonObject

if TYPE_CHECKING:
    from bench.cluster.slurm import JobState
    from harness.record.store import Store


@dataclass(frozen=True)
class RunStatus:
    run_id: str
    matrix: str
    cells: int
    trials: int
    recorded: int
    """Trials that ended and need not run again."""
    left_out: int
    statuses: dict[str, int]
    newest: str | None
    """Newest trial."""
    newest_at: str | None
    """Its start, as ISO 8601."""


def status(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[JOB|RUN]", help="SLURM job or id of a run; by default the newest run."
        ),
    ] = "",
    results: Annotated[Path, typer.Option("--results", help="Folder that the run is in.")] = Path(
        "results"
    ),
    json_output: JsonObject = False,
) -> None:
    """Shows how far along a run is and what SLURM reports about its jobs.

    Example: [bold]python -m bench status 4711[/bold]
    """
    from bench.cluster.slurm import states
    from bench.cluster.submitted import submissions
    from harness.record.store import Store
    from harness.spec.errors import NoRuns, UsageError

    store = Store(results)
    run_ids, submitted = store.run_ids(), submissions(results)
    jobs = [job for job in submitted if name in (job.job, job.run_id)]
    run_id = next((job.run_id for job in jobs if job.run_id), "")
    if not run_id and name:
        run_id = name if name in run_ids else _run_of_job(store, name)
    elif not run_id:
        run_id = run_ids[-1] if run_ids else ""
        jobs = [job for job in submitted if job.run_id == run_id]
    if not run_id and not jobs:
        if name:
            raise UsageError(f"no job or run {name!r} in {str(results)!r}")
        raise NoRuns(f"no runs in results folder {str(results)!r}")
    progress = _progress(store, run_id) if run_id in run_ids else None
    states_of_jobs = [state for job in jobs for state in states(job.job)]
    if json_output:
        begun = {"run_id": run_id, "begun": progress is not None}
        print(
            json.dumps(
                begun
                | (asdict(progress) if progress else {})
                | {
                    "jobs": [asdict(state) for state in states_of_jobs],
                    "submitted": [asdict(job) for job in jobs],
                }
            )
        )
    else:
        _show(run_id, progress, states_of_jobs, forgotten=bool(jobs) and not states_of_jobs)


def _run_of_job(store: Store, job: str) -> str:
    """Returns a run that this job started, or an empty string."""
    for row in store.newest_rows():
        if row["allocation"] and json.loads(row["allocation"]).get("job") == job:
            return str(row["run_id"])
    return ""


def _progress(store: Store, run_id: str) -> RunStatus:
    from harness.record.plan import kept_plan

    plan = kept_plan(store, run_id)
    launched = sorted(
        (trial for trial in store.ended_trials(run_id) if trial.position >= 0),
        key=lambda trial: trial.started_at,
    )
    last = {(trial.cell_id, trial.trial): trial.status for trial in launched}
    newest = launched[-1] if launched else None
    return RunStatus(
        run_id,
        plan.matrix,
        len(plan.cells),
        len(plan.schedule()),
        sum(status != "interrupted" for status in last.values()),
        len(plan.left_out),
        dict(Counter(last.values()).most_common()),
        f"{newest.cell_name} trial {newest.trial}: {newest.status}" if newest else None,
        newest.started_at.isoformat() if newest else None,
    )


def _show(
    run_id: str, progress: RunStatus | None, jobs: Sequence[JobState], forgotten: bool
) -> None:
    """`forgotten`: whether SLURM has dropped the run's jobs."""
    from rich.markup import escape

    from bench.cli import terminal

    console = terminal.console()
    if progress is None:
        console.print(f"run {run_id or '(not named yet)'} has not begun")
    else:
        counts = ", ".join(f"{count} {status}" for status, count in progress.statuses.items())
        console.print(
            f"run {run_id} of matrix {escape(progress.matrix)}: {progress.recorded} of"
            f" {progress.trials} trials ({counts or 'nothing recorded yet'})"
        )
        if progress.newest:
            console.print(f"newest: {escape(progress.newest)}")
    for job in jobs:
        where = f" on {job.nodes}" if job.nodes else ""
        reason = f" ({job.reason})" if job.reason else ""
        again = f", begun anew {job.restarts} times" if job.restarts else ""
        console.print(f"job {job.job_id}: {job.state}{reason}{where}, {job.elapsed}{again}")
    if forgotten:
        console.print("SLURM does not know its jobs any more")
