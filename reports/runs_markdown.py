"""Markdown of each section of several runs' report; empty without data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reports import trends
from reports.markdown import escaped, table
from reports.runs import Run, Runs
from reports.sections import Paragraphs
from reports.text import DASH, number

if TYPE_CHECKING:
    from harness.analysis.compare import ComparedCell
    from harness.analysis.history import Series


def verdict_text(runs: Runs) -> Paragraphs:
    columns = ["run", "started (UTC)", "matrix", "hardware", "verified", "the newest against it"]
    shown = (runs.newest, *runs.shown, *runs.older)
    return [table(columns, [], [_row(run, runs.newest) for run in shown])]


def _row(run: Run, newest: Run) -> list[str]:
    against = run.against.headline if run.against else "in the history only"
    return [
        run.run_id,
        f"{run.row.started_at:%Y-%m-%d %H:%M}",
        run.row.matrix,
        run.hardware,
        f"{run.verified} of {run.cells}",
        "; ".join(filter(None, ["the newest" if run is newest else against, run.why_not])),
    ]


def cells_text(runs: Runs) -> Paragraphs:
    if not runs.rows:
        return []
    columns = ["cell", "newest (samples/s)", *(f"newest / {run.run_id}" for run in runs.shown)]
    rows = [[cell.cell_name, number(cell.speed), *map(_ratio, lines)] for cell, lines in runs.rows]
    return ["Below 1 the newest is slower.", table(columns, columns[1:], rows)]


def _ratio(line: ComparedCell | None) -> str:
    if line is None or line.throughput is None:
        return DASH
    ratio = line.throughput
    interval = "" if ratio.low is None else f" ({number(ratio.low)} to {number(ratio.high)})"
    return f"{number(ratio.ratio)}{interval}, {line.verdict}"


def others_text(runs: Runs) -> Paragraphs:
    rows = [[line.cell_name, run.run_id, line.verdict, line.reason] for run, line in runs.others]
    if not rows:
        return []
    return [
        "A is the other run, B the newest.",
        table(["cell", "newest against", "what", "why"], [], rows),
    ]


def history_text(runs: Runs) -> Paragraphs:
    columns = ["cell", "figure", "runs", "newest", "last change"]
    rows = [
        [series.cell_name, series.figure, str(len(series.points)), _newest(series), _change(series)]
        for series in runs.series
    ]
    few = [] if runs.enough else [f"A change can be seen from {runs.least} runs of a cell on."]
    return [*few, table(columns, columns[2:4], rows)] if rows else []


def _newest(series: Series) -> str:
    unit, factor = trends.unit(series)
    newest = series.newest.value
    half = newest.half_width
    interval = "" if half is None else f" ± {number(half / factor, 2)}"
    return f"{number(newest.value / factor)} {unit}{interval}"


def _change(series: Series) -> str:
    last = series.last_change
    if last is None or last.change is None:
        return DASH
    words = trends.change_words(series, last.change)
    return f"{words} since {last.started_at:%Y-%m-%d}, {last.run_id}"


def method_text(runs: Runs) -> Paragraphs:
    return ["\n".join(f"- {escaped(name)}: {escaped(text)}" for name, text in runs.method.items())]
