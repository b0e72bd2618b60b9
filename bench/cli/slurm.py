from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from bench.cli import options as opt
from bench.run_options import command_line
from harness.cell.errors import UsageError, plural

if TYPE_CHECKING:
    from bench.cluster.jobs import ClusterJob, JobState
    from bench.cluster.site import Site
    from harness.record.store import Store

GpusPerNode: TypeAlias = Annotated[
    int | None, typer.Option("--gpus-per-node", min=0, help="Number of GPUs of each node.")
]
Partition: TypeAlias = Annotated[
    str | None, typer.Option("--partition", "-p", help="SLURM partition.")
]
Account: TypeAlias = Annotated[str | None, typer.Option("--account", "-A", help="SLURM account.")]
TimeLimit: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--time", "-t", help="Time limit of a job, which then requeues itself and continues."
    ),
]
Array: TypeAlias = Annotated[
    int,
    typer.Option("--array", min=0, help="Number of jobs to submit, which share the run's cells."),
]
NewRunId: TypeAlias = Annotated[
    str, typer.Option("--run", help="Id of the run to start, or to continue if it exists.")
]
NightlyJob: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--nightly",
        help="Submit the nightly job: run, report, compare, notify (see slurm/README.md).",
    ),
]
SiteFile: TypeAlias = Annotated[
    Path | None,
    typer.Argument(
        metavar="SITE.yaml",
        help="Site file; by default $PARALLELISM_BENCH_SITE, else slurm/site.yaml.",
    ),
]
JobOrRun: TypeAlias = Annotated[
    str,
    typer.Argument(metavar="JOB|RUN", help="SLURM job or id of a run; by default the newest run."),
]


def submit(
    site: SiteFile = None,
    matrix: opt.Matrix = "",
    nodes: opt.Nodes = None,
    gpus: GpusPerNode = None,
    partition: Partition = None,
    account: Account = None,
    time: TimeLimit = None,
    array: Array = 0,
    run_id: NewRunId = "",
    nightly: NightlyJob = False,
    results: opt.Results = Path("results"),
    only: opt.Only = None,
    skip: opt.Skip = None,
    settings: opt.Settings = None,
    trials: opt.Trials = None,
    report: opt.WriteReport = True,
    dry_run: opt.DryRun = False,
    json_output: opt.Json = False,
) -> None:
    """Submit a matrix as a SLURM job.

    --dry-run prints the batch script.

    Example: [bold]python -m bench submit --matrix full --nodes 2 --dry-run[/bold]
    """
    from bench.cluster.jobs import ClusterJob, batch_script
    from bench.cluster.site import read_site
    from harness.record.plan import new_run_id
    from harness.record.store import require_plain_name

    if run_id:
        require_plain_name(run_id)
    here = read_site(
        site, nodes=nodes, gpus_per_node=gpus, partition=partition, account=account, time=time
    )
    if nightly and (array or run_id):
        raise UsageError("a nightly job makes one new run: leave --array and --run out")
    options = command_line(only=only, skip=skip, settings=settings, trials=trials, report=report)
    matrix = _readable(matrix or (here.nightly.matrix if nightly else ""))
    name = "" if nightly else run_id or new_run_id()
    job = ClusterJob(matrix, name, results.resolve(), tuple(options), array, nightly)
    if without := here.without_gpus():
        print(f"note: {without}", file=sys.stderr)
    if nightly:
        _prepare_nights(here, job, dry_run)
    if not dry_run:
        _submit(here, job, json_output)
    elif json_output:
        print(json.dumps({"script": batch_script(here, job), "run_id": name}))
    else:
        print(batch_script(here, job), end="")


def _prepare_nights(site: Site, job: ClusterJob, dry_run: bool) -> None:
    """Says which slowdown the nights will find, and reports earlier nights that never began."""
    from bench.cli.night import report_night
    from bench.cluster.night import Nights
    from harness.cell.durable import write_atomically

    nights = Nights(job.results, job.matrix)
    print(f"note: {nights.power()}", file=sys.stderr)
    if not dry_run:
        nights.folder.mkdir(parents=True, exist_ok=True)
        nights.folder.chmod(0o700)
        write_atomically(nights.folder / "site.json", site.nightly.model_dump_json())
        for lost in nights.unreported():
            report_night(nights, lost)


def _submit(site: Site, job: ClusterJob, json_output: bool) -> None:
    from bench.cluster.jobs import Submission, batch_script, keep_submission, sbatch

    script = batch_script(site, job)
    job.folder.mkdir(parents=True, exist_ok=True)
    job.folder.chmod(0o700)
    (job.folder / "job.sh").write_text(script)
    job_id = sbatch(script)
    submission = Submission(job_id, job.run_id, job.matrix, site.nodes, job.tasks)
    keep_submission(submission, job.folder)
    if json_output:
        print(submission.as_json())
    else:
        what = f"run {job.run_id}" if job.run_id else "a nightly run"
        print(
            f"submitted job {job_id}: {what} of matrix {job.matrix}; see: python -m bench status"
            f" {job_id}"
        )


def _readable(matrix: str) -> str:
    """Returns the matrix with a path valid in any folder; raises UsageError if there is none."""
    from bench.matrix import HOME, read_matrix

    if not matrix:
        raise UsageError(
            "--matrix is missing; try --matrix smoke, or see: python -m bench list matrices"
        )
    read_matrix(matrix)
    return matrix if (HOME / f"{matrix}.yaml").is_file() else str(Path(matrix).resolve())


def status(
    name: JobOrRun = "",
    results: opt.Results = Path("results"),
    json_output: opt.Json = False,
) -> None:
    """Show how far along a run is, and what SLURM reports about its jobs.

    Example: [bold]python -m bench status 4711[/bold]
    """
    from bench.cluster.jobs import states, submissions
    from harness.cell.errors import NoRuns, UsageError
    from harness.record.store import Store

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
    begun = run_id in run_ids
    progress, sentences = _progress(store, run_id) if begun else ({}, [])
    states_of_jobs = [state for job in jobs for state in states(job.job)]
    if json_output:
        print(
            json.dumps(
                {"run_id": run_id, "begun": begun}
                | progress
                | {
                    "jobs": [asdict(state) for state in states_of_jobs],
                    "submitted": [asdict(job) for job in jobs],
                }
            )
        )
    else:
        if not begun:
            sentences = [f"run {run_id or '(not named yet)'} has not started"]
        _show(sentences, states_of_jobs, forgotten=bool(jobs) and not states_of_jobs)


def _run_of_job(store: Store, job: str) -> str:
    for row in store.newest_rows():
        if row["allocation"] and json.loads(row["allocation"]).get("job") == job:
            return str(row["run_id"])
    return ""


def _progress(store: Store, run_id: str) -> tuple[dict[str, object], list[str]]:
    """Returns how far along a run is, as data and in sentences."""
    from harness.record.plan import kept_plan

    plan = kept_plan(store, run_id)
    launched = sorted(
        (trial for trial in store.ended_trials(run_id) if trial.position >= 0),
        key=lambda trial: trial.started_at,
    )
    last = {(trial.cell_id, trial.trial): trial.status for trial in launched}
    statuses = dict(Counter(last.values()).most_common())
    counts = ", ".join(f"{count} {status}" for status, count in statuses.items())
    ended = {key for key, status in last.items() if status != "interrupted"}
    planned = {(cell.id, trial) for cell, trial in plan.schedule()}
    further = f" and {plural(len(ended - planned), 'further trial')}" if ended - planned else ""
    counted = f"{len(ended & planned)} of {len(planned)} planned trials{further}"
    counted += f" ({counts or 'nothing recorded yet'})"
    sentences = [f"run {run_id} of matrix {plan.matrix}: {counted}"]
    newest = newest_at = None
    if launched:
        trial = launched[-1]
        newest = f"{trial.cell_name} trial {trial.trial}: {trial.status}"
        newest_at = trial.started_at.isoformat()
        sentences.append(f"newest: {newest}")
    return {
        "run_id": run_id,
        "matrix": plan.matrix,
        "cells": len(plan.cells),
        "trials": len(planned),
        "recorded": len(ended & planned),
        "further": len(ended - planned),
        "left_out": len(plan.left_out),
        "statuses": statuses,
        "newest": newest,
        "newest_at": newest_at,
    }, sentences


def _show(sentences: Sequence[str], jobs: Sequence[JobState], forgotten: bool) -> None:
    from rich.markup import escape

    from bench.cli import terminal

    console = terminal.console()
    for sentence in sentences:
        console.print(escape(sentence))
    for job in jobs:
        where = f" on {job.nodes}" if job.nodes else ""
        reason = f" ({job.reason})" if job.reason else ""
        again = f", restarted {plural(job.restarts, 'time')}" if job.restarts else ""
        console.print(f"job {job.job_id}: {job.state}{reason}{where}, {job.elapsed}{again}")
    if forgotten:
        console.print("SLURM no longer lists its jobs")
