from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from bench.cli.options import Json, OutFile, Results

if TYPE_CHECKING:
    from rich.console import Console

    from harness.analysis.compare import RunComparison
    from harness.analysis.history import Series
    from harness.analysis.selection import MeasuredCell

WIDTH = 28
"""Width of a history chart in characters, one per run."""

Sides: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="A B",
        help=(
            "Two runs or results folders; without the second, the newest run. A run is named by"
            " its id or a prefix of it, latest, or latest~1 for the run before of the same matrix;"
            " a folder stands for the newest run of each of its cells, and NAME for the folder"
            " results/reference/NAME. With --history: one strategy, cell id or pattern."
        ),
    ),
]
CellPair: TypeAlias = Annotated[
    tuple[str, str] | None,
    typer.Option("--cells", help="Compare two cells of one run; give labels or patterns."),
]
ShowHistory: TypeAlias = Annotated[
    bool, typer.Option("--history", help="Show how a cell, or every cell, changed over all runs.")
]
Figure: TypeAlias = Annotated[
    Literal["throughput", "memory"], typer.Option("--figure", help="With --history: what to show.")
]
FailOn: TypeAlias = Annotated[
    Literal["regression"] | None,
    typer.Option(
        "--fail-on",
        help="Exit code 1 on a regression, such as a slower, missing or failing cell; with"
        " --history, if a cell's last lasting change was for the worse.",
    ),
]
Format: TypeAlias = Annotated[
    Literal["table", "md", "json", "html"] | None,
    typer.Option(
        "--format", help="Output format; by default the suffix of --out decides, else table."
    ),
]


def compare(
    sides: Sides = None,
    cells: CellPair = None,
    history: ShowHistory = False,
    figure: Figure = "throughput",
    results: Results = Path("results"),
    fail_on: FailOn = None,
    format_name: Format = None,
    out: OutFile = None,
    json_output: Json = False,
) -> None:
    """Compare two runs, two cells of a run, or a cell over all runs.

    Cells are compared on equal hardware. B defaults to the newest run.

    Example: [bold]python -m bench compare latest~1 latest --fail-on regression[/bold]
    """
    from bench.select import find_sides
    from harness.analysis.compare import compare_sides
    from harness.cell.errors import UsageError

    named_sides = sides or []
    if history:
        if cells or format_name or out or len(named_sides) > 1:
            raise UsageError(
                "--history takes at most one cell or pattern, and only the options --figure,"
                " --fail-on, --results and --json"
            )
        pattern = named_sides[0] if named_sides else None
        worse = _show_history(results, pattern, figure, json_output)
        raise typer.Exit(bool(fail_on and worse))
    if json_output and out is None and format_name not in (None, "json"):
        raise UsageError(
            f"--json prints JSON, but --format {format_name} goes to the terminal too: leave one of"
            " the two out, or name a file with --out"
        )
    comparison = (
        _within(named_sides, cells, results)
        if cells
        else compare_sides(*find_sides(named_sides, results))
    )
    if out is not None or not json_output:
        suffixes = {".md": "md", ".json": "json", ".html": "html"}
        by_suffix = suffixes.get(out.suffix if out else "", "table")
        _write(comparison, format_name or by_suffix, out)
    if json_output:
        _write(comparison, "json", None)
    elif out is not None:
        print(out)
    if fail_on and not comparison.comparisons and not comparison.regressions:
        raise UsageError(
            "--fail-on regression: no cell could be compared, so regressions cannot be detected;"
            " see the table for the reasons"
        )
    if fail_on and comparison.regressions:
        raise typer.Exit(1)


def _write(comparison: RunComparison, chosen: str, out: Path | None) -> None:
    from bench.cli import terminal
    from reports import write_whole
    from reports.runs import told

    if out is not None:
        write_whole(_text(comparison, chosen), out, "python -m bench compare A B --out FILE")
    elif chosen == "table":
        terminal.write(terminal.console(), told(comparison))
    else:
        print(_text(comparison, chosen), end="")


def _within(sides: list[str], patterns: tuple[str, str], results: Path) -> RunComparison:
    from bench.select import closest, find_run, no_such_cell
    from harness.analysis.compare import compare_cells
    from harness.analysis.selection import measured
    from harness.analysis.setting import Setting
    from harness.cell.errors import UsageError
    from harness.record.store import Store

    if len(sides) > 1:
        raise UsageError("--cells compares two cells of one run: name one run")
    store = Store(results)
    run_id = find_run(store, *(sides or ["latest"]))
    predicted_widths = measured(store.load([run_id], steps=False))
    for pattern in patterns:
        if not closest(predicted_widths, pattern):
            raise no_such_cell(pattern, f"run {run_id}", predicted_widths)
    first, second = (closest(predicted_widths, pattern) for pattern in patterns)
    pairs = [
        (a, b)
        for a in first
        for b in second
        if a.cell_id != b.cell_id and Setting.of(a.cell) == Setting.of(b.cell)
    ]
    if not pairs:
        alike = "workload, devices, precision and batch"
        raise UsageError(
            f"--cells: no cell matching {patterns[0]!r} has the same {alike} as one matching"
            f" {patterns[1]!r}"
        )
    return compare_cells(run_id, pairs, patterns)


def _text(comparison: RunComparison, chosen: str) -> str:
    import io

    from rich.console import Console

    from bench.cli import terminal
    from reports.runs import markdown, page, told

    if chosen == "json":
        return json.dumps(comparison.as_json()) + "\n"
    if chosen in ("md", "html"):
        return markdown(comparison) if chosen == "md" else page(comparison)
    with io.StringIO() as text:
        console = Console(file=text, width=160, highlight=False, soft_wrap=True)
        terminal.write(console, told(comparison))
        return text.getvalue()


def _show_history(
    results: Path, pattern: str | None, figure: Literal["throughput", "memory"], json_output: bool
) -> bool:
    """Returns whether a cell's last change was for the worse."""
    from bench.cli import terminal
    from harness.analysis.history import MIN_RUNS, histories, method

    all_series = histories(_measured(results, pattern), figure)
    if json_output:
        document = {
            "figure": figure,
            "method": method(figure),
            "cells": [series.as_json() for series in all_series],
        }
        print(json.dumps(document))
        return any(series.worse for series in all_series)
    out = terminal.console()
    if pattern is not None and len(all_series) == 1:
        _runs(out, all_series[0])
    else:
        _cells(out, all_series)
    if not all_series:
        out.print(f"no verified trial has a value for {figure}")
    elif max(len(series.points) for series in all_series) < 2 * MIN_RUNS:
        out.print(f"changes can be detected once a cell has {2 * MIN_RUNS} runs")
    for name, explanation in method(figure).items():
        out.print(f"{name}: {explanation}")
    return any(series.worse for series in all_series)


def _measured(results: Path, pattern: str | None) -> list[MeasuredCell]:
    from bench.select import matching, no_such_cell
    from harness.analysis.selection import measured
    from harness.record.store import Store

    precisions = measured(Store(results).load(steps=False))
    if pattern is None:
        return precisions
    meant = matching(precisions, pattern)
    if not meant:
        raise no_such_cell(pattern, repr(str(results)), precisions)
    return meant


def _value_text(series: Series, value: float) -> str:
    return f"{value:.1f} samples/s" if series.figure == "throughput" else f"{value / 2**20:.1f} MiB"


def _runs(out: Console, series: Series) -> None:
    from rich.markup import escape

    from bench.cli import terminal
    from harness.cell.errors import plural
    from reports.runs import change_words

    values = [point.value.value for point in series.points]
    low, high = min(values), max(values)
    out.print(
        f"{escape(series.cell_name)}: {series.figure} from {_value_text(series, low)} to"
        f" {_value_text(series, high)}"
    )
    table = terminal.table(None, "date", "run", series.figure, "95%", "trials", left=("run",))
    table.add_column("smallest to largest", no_wrap=True)
    table.add_column("change from here on")
    for point in series.points:
        ends = [_value_text(series, end) for end in (point.value.low, point.value.high) if end]
        column = round((WIDTH - 1) * (point.value.value - low) / (high - low)) if high > low else 0
        table.add_row(
            f"{point.started_at:%Y-%m-%d %H:%M}",
            point.run_id,
            _value_text(series, point.value.value),
            " to ".join(end.split()[0] for end in ends) or "1 trial",
            str(point.value.trials),
            "·" * column + "█",
            "" if point.change is None else change_words(series, point.change),
        )
    out.print(table)
    if series.elsewhere:
        out.print(f"left out: {plural(series.elsewhere, 'run')} on other hardware")
    if series.failed:
        failed = plural(series.failed, "run")
        out.print(f"left out: {failed} in which it failed or was not verified")


def _cells(out: Console, all_series: list[Series]) -> None:
    from rich.markup import escape

    from bench.cli import terminal
    from reports.cell_detail import sparkline
    from reports.runs import change_words

    texts = ("over the runs", "last change")
    table = terminal.table(None, "cell", "runs", "newest", *texts, left=texts)
    for series in all_series:
        last = series.last_change
        since = ""
        if last is not None and last.change is not None:
            change = change_words(series, last.change)
            since = f"{change} since {last.started_at:%Y-%m-%d} {last.run_id}"
        values = [point.value.value for point in series.points]
        table.add_row(
            escape(series.cell_name),
            str(len(values)),
            _value_text(series, values[-1]),
            sparkline(values[-WIDTH:], WIDTH),
            since,
        )
    if all_series:
        out.print(table)
