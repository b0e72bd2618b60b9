from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bench.cli.options import Json
from harness.spec.text import plural


def site(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="RESULTS...", help="Results folders, or folders that contain some."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to write to.")] = Path("site"),
    json_output: Json = False,
) -> None:
    """Write a static site that collects runs of several machines and people.

    One page lists all runs and cells, with filters; each run has its report. The pages need no
    server and load nothing.

    Example: [bold]python -m bench site results/ results-of-others/ --out site[/bold]
    """
    from harness.record.integrity import stores_below
    from harness.spec.errors import NoRuns, UsageError
    from reports.site import INDEX, write_site

    for folder in results:
        if not folder.is_dir():
            raise UsageError(f"there is no results folder {str(folder)!r}")
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {str(out)!r} is a file; name a folder")
    stores = [store for folder in results for store in stores_below(folder) if store.run_ids()]
    if not stores:
        raise NoRuns(f"no runs in {', '.join(repr(str(folder)) for folder in results)}")
    written = write_site(stores, out, "python -m bench site RESULTS --out FOLDER")
    index, runs = out / INDEX, [entry.run.run_id for entry in written]
    machines = list(dict.fromkeys(entry.machine for entry in written))
    if json_output:
        print(json.dumps({"site": str(index), "runs": runs, "machines": machines}))
    else:
        print(f"{index}: {plural(len(runs), 'run')} of {plural(len(machines), 'machine')}")
