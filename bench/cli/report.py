from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from bench.cli.options import AllRuns, BaselineCell, Json, OutFile, Results, Runs
from harness.cell.errors import plural
from reports import Format, format_of

if TYPE_CHECKING:
    from harness.record.store import Store

PAGES = Path("reports") / "html"
SECTIONED = ("html", "md", "pdf-ready")
_USAGE = "python -m bench report --out FILE"

Each: TypeAlias = Annotated[
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


@dataclass(frozen=True)
class ReportOptions:
    format_name: Format
    sections: tuple[str, ...]
    baseline: str
    out: Path | None
    json_output: bool


def report(
    run: Runs = None,
    results: Results = Path("results"),
    every: AllRuns = False,
    each: Each = False,
    format_name: FormatName = None,
    section: Sections = None,
    baseline_cell: BaselineCell = "",
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
    from harness.cell.errors import UsageError
    from harness.record.store import Store

    store = Store(results)
    options = ReportOptions(
        format_name or (format_of(out) if out else "html"),
        tuple(section or ()),
        baseline_cell,
        out,
        json_output,
    )
    _check(options, open_browser and not index)
    if index:
        if run or every or each or section or baseline_cell or format_name not in (None, "html"):
            raise UsageError(
                "--index writes only the index of all runs: combine it only with --results,"
                " --out, --open and --json"
            )
        written, run_ids = [_index(store, out or PAGES / "index.html")], store.run_ids()
    else:
        written, run_ids = _reports(store, run or [], every, each, options)
    if json_output:
        paths = [str(path) for path in written]
        print(json.dumps({"report": paths[0], "reports": paths, "runs": run_ids}))
    else:
        for path in written:
            print(path)
    if open_browser:
        for path in written:
            typer.launch(path.resolve().as_uri())


def _check(options: ReportOptions, open_browser: bool) -> None:
    from harness.cell.errors import UsageError

    out, chosen = options.out, options.format_name
    if out is not None and out.is_dir():
        raise UsageError(
            f"--out {str(out)!r} is a folder; name the file, such as {str(out / 'report.html')!r}"
        )
    if chosen not in SECTIONED and options.sections:
        raise UsageError(
            f"--section selects parts of a page or text, but {chosen} always has every cell:"
            " leave --section out, or use --format html or md"
        )
    if open_browser and out is None and chosen not in ("html", "pdf-ready"):
        raise UsageError(
            f"--open shows a file, but --format {chosen} goes to the terminal: name a file with"
            " --out"
        )


def _reports(
    store: Store, patterns: Sequence[str], every: bool, per_run: bool, options: ReportOptions
) -> tuple[list[Path], list[str]]:
    from bench.select import find_runs
    from harness.cell.errors import UsageError

    run_ids = find_runs(store, patterns, every)
    if per_run and options.out is not None and len(run_ids) > 1:
        raise UsageError(
            f"--out names one file, but --each writes {len(run_ids)} reports; leave one of the"
            " two out"
        )
    groups = [[run_id] for run_id in run_ids] if per_run else [run_ids]
    if options.baseline and len(groups[0]) > 1:
        raise UsageError("--baseline-cell is for reports of one run: name one, or use --each")
    written = [_one(store, group, options) for group in groups]
    return [path for path in written if path is not None], run_ids


def _one(store: Store, wanted: list[str], options: ReportOptions) -> Path | None:
    from harness.cell.errors import UsageError
    from reports import write_whole

    if options.out is None and options.format_name not in ("html", "pdf-ready"):
        if options.json_output:
            raise UsageError(
                f"--json lists the files written, but --format {options.format_name} goes to the"
                " terminal: name a file with --out"
            )
        print(_text(store, wanted, options), end="")
        return None
    name = wanted[0] if len(wanted) == 1 else f"{wanted[0]}-to-{wanted[-1]}"
    suffix = ".print.html" if options.format_name == "pdf-ready" else ".html"
    path = options.out or PAGES / f"{name}{suffix}"
    return write_whole(_text(store, wanted, options), path, _USAGE)


def _text(store: Store, wanted: list[str], options: ReportOptions) -> str:
    from bench.select import baseline_choice
    from harness.record.plan import kept_plan
    from reports import report_text

    results = store.load(wanted, steps=False)
    baseline = baseline_choice(options.baseline, kept_plan(store, wanted[0]).cells)
    written = report_text(results, options.format_name, options.sections, baseline)
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
