"""bench submit: a matrix on a SLURM cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from bench.cli.options import JsonObject


def submit(
    matrix: Annotated[
        str,
        typer.Option(
            "--matrix",
            "-m",
            help="Name of a matrix (see: python -m bench list matrices) or a YAML file.",
        ),
    ] = "",
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Nodes of the job.")] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus-per-node", min=0, help="GPUs of each node.")
    ] = None,
    partition: Annotated[
        str | None, typer.Option("--partition", "-p", help="SLURM partition.")
    ] = None,
    account: Annotated[str | None, typer.Option("--account", "-A", help="SLURM account.")] = None,
    time: Annotated[
        str | None,
        typer.Option("--time", "-t", help="Time limit of a job; the run goes on in another."),
    ] = None,
    array: Annotated[
        int,
        typer.Option(
            "--array", min=0, help="Submit this many jobs, which share the cells of the run."
        ),
    ] = 0,
    run_id: Annotated[
        str, typer.Option("--run", help="Id of a run that the job goes on with.")
    ] = "",
    nightly: Annotated[
        bool,
        typer.Option(
            "--nightly",
            help="Submit the nightly job: run, report, compare, notify (see slurm/README.md).",
        ),
    ] = False,
    site: Annotated[
        Path | None,
        typer.Option(
            "--site", help="Site file; default: $PARALLELISM_BENCH_SITE, else slurm/site.yaml."
        ),
    ] = None,
    results: Annotated[
        Path,
        typer.Option("--results", help="Folder that results are added to; all nodes must see it."),
    ] = Path("results"),
    only: Annotated[
        list[str] | None, typer.Option("--only", help="As for: python -m bench run.")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", help="As for: python -m bench run.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="As for: python -m bench run.")
    ] = None,
    trials: Annotated[
        int | None, typer.Option("--trials", min=1, help="As for: python -m bench run.")
    ] = None,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Write the HTML report at the end.")
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the batch script and stop.")
    ] = False,
    json_output: JsonObject = False,
) -> None:
    """Submits a matrix as a SLURM job.

    Example: [bold]python -m bench submit --matrix full --nodes 2 --gpus-per-node 8 --dry-run[/bold]
    """
    from bench.cluster.script import Job, batch_script
    from bench.cluster.site import read_site
    from bench.cluster.slurm import submit as sbatch
    from bench.cluster.submitted import Submission, keep_submission
    from harness.record.plan import new_run_id
    from harness.spec.errors import UsageError

    here = read_site(
        site, nodes=nodes, gpus_per_node=gpus, partition=partition, account=account, time=time
    )
    matrix = matrix or (here.nightly.matrix if nightly else "")
    if not matrix:
        raise UsageError(
            "--matrix is missing; try --matrix smoke, or see: python -m bench list matrices"
        )
    if nightly and (array or run_id):
        raise UsageError("a night is a run of its own in one job: leave --array and --run out")
    matrix = _readable(matrix)
    several = (("--only", only), ("--skip", skip), ("--set", settings))
    options = [
        word for option, values in several for value in values or [] for word in (option, value)
    ]
    options += ["--trials", str(trials)] if trials else []
    options += [] if report else ["--no-report"]
    name = "" if nightly else run_id or new_run_id()
    job = Job(matrix, name, results.resolve(), tuple(options), array, nightly)
    script = batch_script(here, job)
    if without := here.without_gpus():
        print(f"note: {without}", file=sys.stderr)
    if dry_run:
        print(
            json.dumps({"script": script, "run_id": name}) if json_output else script,
            end="\n" if json_output else "",
        )
        return
    job.folder.mkdir(parents=True, exist_ok=True)
    job.folder.chmod(0o700)
    (job.folder / "job.sh").write_text(script)
    job_id = sbatch(script)
    submission = Submission(job_id, name, matrix, here.nodes, array)
    keep_submission(submission, job.folder)
    if json_output:
        print(submission.as_json())
    else:
        print(
            f"submitted job {job_id}: {f'run {name}' if name else 'a night'} of matrix {matrix};"
            f" see: python -m bench status {job_id}"
        )


def _readable(matrix: str) -> str:
    """Returns the matrix with a path that holds from any folder; raises UsageError if there is
    none."""
    from bench.matrix import HOME, read_matrix

    read_matrix(matrix)
    return matrix if (HOME / f"{matrix}.yaml").is_file() else str(Path(matrix).resolve())
