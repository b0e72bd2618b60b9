from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from bench.cli.options import AllRuns, BaselineCell, Json, OutFile, Results, Runs
from harness.cell.errors import plural
from reports import Format, format_of

if TYPE_CHECKING:
    from harness.record.store import Store

PAGES = Path("reports") / "html"
PAGE_FORMATS = ("html", "pdf-ready")
SECTIONED = ("html", "md", "pdf-ready")
_USAGE = "python -m bench report --out FILE"

Separate: TypeAlias = Annotated[
    bool, typer.Option("--each", help="Write a separate report for each run.")
]
FormatName: TypeAlias = Annotated[
    Format | None,
    typer.Option(
        "--format", help="Output format; by default the suffix of --out decides, else html."
    ),
]
Sections: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--section",
        help="Only this section, such as verdict (html, md, pdf-ready); may be repeated.",
    ),
]
Index: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--index", help="Write reports/html/index.html: all runs, newest first, with links."
    ),
]
OpenBrowser: TypeAlias = Annotated[
    bool, typer.Option("--open", help="Open the result in the browser.")
]


def report(
    run: Runs = None,
    results: Results = Path("results"),
    every: AllRuns = False,
    separate: Separate = False,
    format_name: FormatName = None,
    section: Sections = None,
    baseline: BaselineCell = "",
    index: Index = False,
    out: OutFile = None,
    open_browser: OpenBrowser = False,
    json_output: Json = False,
) -> None:
    """Write the report of one run or several, or the index of all.

    Several runs make one page that compares them. Without --out, pages go to reports/html/, text
    and data to the terminal.

    Example: [bold]python -m bench report --open[/bold]
    """
    from bench.select import find_runs
    from harness.cell.errors import UsageError
    from harness.record.store import Store
    from reports import write_whole

    store, sections = Store(results), section or []
    chosen = format_name or (format_of(out) if out else "html")
    uses_of_file = ["--open shows a file"] if open_browser else []
    uses_of_file += ["--json lists the files written"] if json_output else []
    _check(chosen, sections, out, [] if index else uses_of_file)
    if index:
        if run or every or separate or section or baseline or format_name not in (None, "html"):
            raise UsageError(
                "--index writes only the index of all runs: combine it only with --results,"
                " --out, --open and --json"
            )
        written, run_ids = [_index(store, out or PAGES / "index.html")], store.run_ids()
    else:
        run_ids = find_runs(store, run or [], every)
        if separate and out and len(run_ids) > 1:
            raise UsageError(
                f"--out names one file, but --each writes {len(run_ids)} reports; leave one of the"
                " two out"
            )
        if baseline and not separate and len(run_ids) > 1:
            raise UsageError("--baseline is for reports of one run: name one, or use --each")
        written = []
        for group in [[run_id] for run_id in run_ids] if separate else [run_ids]:
            text = _text(store, group, chosen, sections, baseline)
            if path := out or _page(group, chosen):
                written.append(write_whole(text, path, _USAGE))
            else:
                print(text, end="")
    paths = [str(path) for path in written]
    if json_output:
        print(json.dumps({"report": paths[0], "reports": paths, "runs": run_ids}))
    else:
        print("".join(f"{path}\n" for path in paths), end="")
    for path in written if open_browser else ():
        typer.launch(path.resolve().as_uri())


def _check(
    chosen: Format, sections: Sequence[str], out: Path | None, uses_of_file: Sequence[str]
) -> None:
    from harness.cell.errors import UsageError

    if out is not None and out.is_dir():
        raise UsageError(
            f"--out {str(out)!r} is a folder; name the file, such as {str(out / 'report.html')!r}"
        )
    if chosen not in SECTIONED and sections:
        raise UsageError(
            f"--section selects parts of a page or text, but {chosen} always has every cell:"
            " leave --section out, or use --format html or md"
        )
    for use in uses_of_file:
        if out is None and chosen not in PAGE_FORMATS:
            raise UsageError(
                f"{use}, but --format {chosen} goes to the terminal: name a file with --out"
            )


def _page(wanted: Sequence[str], chosen: Format) -> Path | None:
    """Returns where a page of these runs goes; None for a format that goes to the terminal."""
    if chosen not in PAGE_FORMATS:
        return None
    name = wanted[0] if len(wanted) == 1 else f"{wanted[0]}-to-{wanted[-1]}"
    return PAGES / f"{name}{'.print.html' if chosen == 'pdf-ready' else '.html'}"


def _text(
    store: Store, wanted: list[str], chosen: Format, sections: Sequence[str], baseline: str
) -> str:
    from bench.select import baseline_choice
    from harness.record.plan import kept_plan
    from reports import report_text

    results = store.load(wanted, steps=False)
    choice = baseline_choice(baseline, kept_plan(store, wanted[0]).cells)
    written = report_text(results, chosen, sections, choice)
    if written.absent:
        typer.echo(f"without data, so left out: {', '.join(written.absent)}", err=True)
    return written.text


def _index(store: Store, path: Path) -> Path:
    from reports import site, write_whole

    text = site.page(site.entries(store, path.parent), path.parent)
    return write_whole(text, path, "python -m bench report --index --out FILE")


def site(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="RESULTS", help="Results folders, or folders that contain some."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to write to.")] = Path("site"),
    json_output: Json = False,
) -> None:
    """Write a static site that collects runs of several machines and people.

    One page lists all runs and cells, with filters; each run has its report. The pages need no
    server and load nothing.

    Example: [bold]python -m bench site results/ results-of-others/ --out site[/bold]
    """
    from harness.cell.errors import NoRuns, UsageError
    from harness.record.store import stores_below
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
