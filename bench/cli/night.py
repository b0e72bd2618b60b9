from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli.options import Json, Results

if TYPE_CHECKING:
    from bench.cluster.night import Nights, Outcome


def night(
    matrix: Annotated[str, typer.Argument(metavar="MATRIX", help="Name of the nights' matrix.")],
    accept: Annotated[
        str,
        typer.Option(
            "--accept", metavar="RUN", help="Acknowledge a change: this run is the new standard."
        ),
    ] = "",
    begin: Annotated[
        str, typer.Option("--begin", metavar="RUN", help="For the job: note that a night begins.")
    ] = "",
    end: Annotated[
        str, typer.Option("--end", metavar="RUN", help="For the job: judge and report a night.")
    ] = "",
    code: Annotated[int, typer.Option("--code", help="With --end: exit code of the run.")] = 0,
    results: Results = Path("results"),
    json_output: Json = False,
) -> None:
    """List nights of a matrix and the slowdown that they find, or acknowledge a change.

    The nightly job (see slurm/README.md) calls it to judge a night: exit code 1 if it is bad.

    Example: [bold]python -m bench night full --accept latest[/bold]
    """
    from bench.cluster.night import FINE, Nights
    from bench.select import find_run

    nights, job = Nights(results, matrix), os.environ.get("SLURM_JOB_ID", "")
    if accept:
        run_id = find_run(nights.store, accept)
        nights.accept(run_id)
        print(f"{run_id} is the standard of the nights of {nights.matrix}")
    elif begin:
        for lost in nights.unreported(job):
            report_night(nights, lost)
        nights.note("began", run=begin, job=job)
    elif end:
        site = nights.site()
        done = nights.end(end, job, code, site.baseline)
        report_night(nights, done)
        if code in (0, 1):
            _write_pages(nights, done, Path(site.publish or "reports/html"), site.textfile)
        raise typer.Exit(done.name not in FINE)
    elif json_output:
        print(json.dumps({"nights": nights.events(), "power": nights.power()}))
    else:
        for event in nights.events():
            details = (event.get(key, "") for key in ("event", "run", "outcome"))
            print(" ".join(filter(None, details)))
        print(nights.power())


def report_night(nights: Nights, done: Outcome) -> None:
    from bench.cluster.night import tell
    from harness.cell.durable import write_atomically
    from reports.runs import markdown

    doctor = nights.folder / f"{done.run_id}.doctor.txt"
    tables = [markdown(compared) for compared in done.against]
    details = "\n".join([done.text, *tables, *([doctor.read_text()] if doctor.exists() else [])])
    if done.run_id:
        write_atomically(nights.folder / f"{done.run_id}.txt", details)
    for problem in tell(nights.site(), nights.matrix, done, details):
        print(problem)
    print(f"night {done.run_id}: {done.name}\n{done.text}", file=sys.stderr)


def _write_pages(nights: Nights, done: Outcome, folder: Path, textfile: str) -> None:
    from reports import report_text, site, write_whole
    from reports.publish import publish
    from reports.runs import page

    store = nights.store
    pages = {
        f"{done.run_id}.html": [done.run_id],
        f"{nights.matrix}-trend.html": nights.runs(),
    }
    for name, run_ids in pages.items():
        write_whole(report_text(store.load(run_ids, steps=False)).text, folder / name)
    for compared, name in zip(done.against, ("good-nights", "baseline"), strict=False):
        write_whole(page(compared), folder / f"{done.run_id}-against-{name}.html")
    write_whole(site.page(site.entries(store, folder), folder), folder / "index.html")
    if textfile:
        publish("prometheus", store.load([done.run_id], steps=False), Path(textfile))
