"""bench report: reports of one or several runs, and the index of all."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from bench.cli.options import BaselineCell, ResultsRead

if TYPE_CHECKING:
    from harness.record.store import Store

Format = Literal["html", "md", "csv", "json", "pdf-ready"]
PAGES = Path("reports") / "html"
SECTIONED = ("html", "md", "pdf-ready")
_USAGE = "python -m bench report --out FILE"


def report(
    run: Annotated[
        list[str] | None,
        typer.Argument(
            help=(
                "Runs: id, its first letters, latest, latest~1; by default the newest. Several make"
                " one page that compares them."
            )
        ),
    ] = None,
    results: ResultsRead = Path("results"),
    every: Annotated[
        bool, typer.Option("--all", help="All runs of the folder against each other.")
    ] = False,
    each: Annotated[
        bool, typer.Option("--each", help="A report of its own for each of several runs instead.")
    ] = False,
    format_name: Annotated[
        Format | None, typer.Option("--format", help="By default as --out ends, else html.")
    ] = None,
    section: Annotated[
        list[str] | None,
        typer.Option(
            "--section",
            help="Only this section, such as verdict (html, md, pdf-ready); may be repeated.",
        ),
    ] = None,
    baseline_cell: BaselineCell = "",
    index: Annotated[
        bool,
        typer.Option(
            "--index", help="Write reports/html/index.html: all runs, newest first, with links."
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="File; else pages go to reports/html/, text and data to the terminal."
        ),
    ] = None,
    open_browser: Annotated[
        bool, typer.Option("--open", help="Open what was written in the browser.")
    ] = False,
    json_output: Annotated[
        bool,
        typer.Option("--json", help="For machines: one JSON object that says what was written."),
    ] = False,
) -> None:
    """Writes the report of a run, of several against each other, or the index of all.

    Example: [bold]python -m bench report --open[/bold]
    """
    from bench.select import find_runs
    from harness.record.store import Store
    from harness.spec.errors import UsageError

    if out is not None and out.is_dir():
        raise UsageError(
            f"--out {str(out)!r} is a folder; name the file, such as {str(out / 'report.html')!r}"
        )
    store, chosen = Store(results), format_name or _by_suffix(out)
    if chosen not in SECTIONED and section:
        raise UsageError(
            f"--section cuts a page or a text; {chosen} has every cell: leave --section out, or use"
            " --format html or md"
        )
    if open_browser and out is None and chosen not in ("html", "pdf-ready") and not index:
        raise UsageError(
            f"--open shows a file, but --format {chosen} goes to the terminal: name a file with"
            " --out"
        )
    if index:
        if run or every or each or section or format_name not in (None, "html"):
            raise UsageError(
                "--index writes the index of all runs and nothing else: give it with --results,"
                " --out, --open and --json alone"
            )
        written, run_ids = [_index(store, out or PAGES / "index.html")], store.run_ids()
    else:
        run_ids = find_runs(store, run or [], every)
        if each and out is not None and len(run_ids) > 1:
            raise UsageError(
                f"--out names one file, but --each writes one for each of {len(run_ids)} runs;"
                " leave one of the two out"
            )
        groups = [[run_id] for run_id in run_ids] if each else [run_ids]
        if baseline_cell and len(groups[0]) > 1:
            raise UsageError("--baseline-cell is for reports of one run: name one, or use --each")
        shown = Shown(chosen, tuple(section or ()), baseline_cell)
        written = [
            path
            for group in groups
            if (path := _one(store, group, shown, out, json_output)) is not None
        ]
    if json_output:
        print(
            json.dumps(
                {
                    "report": str(written[0]),
                    "reports": [str(path) for path in written],
                    "runs": run_ids,
                }
            )
        )
    else:
        for path in written:
            print(path)
    if open_browser:
        for path in written:
            typer.launch(path.resolve().as_uri())


def _by_suffix(out: Path | None) -> Format:
    suffix = out.suffix.lstrip(".") if out else ""
    return suffix if suffix in get_args(Format) else "html"  # type: ignore[return-value]


@dataclass(frozen=True)
class Shown:
    format_name: Format
    sections: tuple[str, ...]
    baseline: str
    """Cell that the others are compared with; empty: the default."""


def _one(
    store: Store,
    wanted: list[str],
    shown: Shown,
    out: Path | None,
    told_as_json: bool,
) -> Path | None:
    """Returns the written file; None if the report was printed."""
    from harness.spec.errors import UsageError
    from reports import write_whole

    if out is None and shown.format_name not in ("html", "pdf-ready"):
        if told_as_json:
            raise UsageError(
                f"--json says which files were written, but --format {shown.format_name} goes to"
                " the terminal: name a file with --out"
            )
        print(_text(store, wanted, shown), end="")
        return None
    name = wanted[0] if len(wanted) == 1 else f"{wanted[0]}-to-{wanted[-1]}"
    path = out or PAGES / f"{name}{'.print' if shown.format_name == 'pdf-ready' else ''}.html"
    return write_whole(_text(store, wanted, shown), path, _USAGE)


def _text(store: Store, wanted: list[str], shown: Shown) -> str:
    from bench.select import baseline_choice
    from harness.record.plan import kept_plan
    from reports import export_records, runs
    from reports.markdown_report import markdown
    from reports.run_page import run_page
    from reports.run_report import each, ran
    from reports.runs_page import runs_page, runs_text

    chosen, sections = shown.format_name, shown.sections
    results = store.load(wanted, steps=False)
    several = len(wanted) > 1
    baseline = baseline_choice(shown.baseline, kept_plan(store, wanted[0]).cells)
    if chosen == "csv":
        return export_records.as_csv(each(results, baseline))
    if chosen == "json":
        compared = runs.as_json(runs.compare_all(results)) if several else {}
        return export_records.as_json(each(results, baseline), **compared)
    if chosen == "md":
        text, absent = (
            runs_text(runs.compare_all(results), sections)
            if several
            else markdown(ran(results, baseline), sections)
        )
    else:
        printed = chosen == "pdf-ready"
        page = (
            runs_page(runs.compare_all(results), sections, printed)
            if several
            else run_page(ran(results, baseline), sections, printed)
        )
        text, absent = page.text, page.absent
    if absent:
        typer.echo(f"without data, so left out: {', '.join(absent)}", err=True)
    return text


def _index(store: Store, path: Path) -> Path:
    from reports import overview, write_whole

    return write_whole(
        overview.page(store, path.parent), path, "python -m bench report --index --out FILE"
    )
