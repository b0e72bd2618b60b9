"""Several runs against each other as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from reports import trends
from reports.markdown import escaped, table
from reports.runs import Runs
from reports.sections import require_some
from reports.text import DASH, number, plural

if TYPE_CHECKING:
    from harness.analysis.compare import ComparedCell
    from harness.analysis.history import Series


def markdown(found: Runs, wanted: Sequence[str] = ()) -> tuple[str, list[str]]:
    """The comparison, of all sections that have data or of the wanted ones; and which of these it
    lacks.

    Raises UsageError for all lacking.
    """
    parts = {name: made for name, (_, make) in SECTIONS.items() if (made := make(found))}
    absent = require_some(wanted, parts)
    newest = found.newest
    lines = [
        (
            f"# How do these runs compare? {plural(len(found.runs), 'run')}, the newest"
            f" {escaped(newest.run_id)}"
        )
    ]
    for name, made in parts.items():
        if not wanted or name in wanted:
            lines += [f"## {SECTIONS[name][0]}", *made]
    return "\n\n".join(lines) + "\n", absent


def _verdict(found: Runs) -> list[str]:
    columns = ["run", "started (UTC)", "matrix", "hardware", "verified", "the newest against it"]
    rows = []
    for run in (found.newest, *found.shown, *found.older):
        against = (
            run.against.headline
            if run.against
            else "the newest"
            if run is found.newest
            else "in the history only"
        )
        told = "; ".join(filter(None, [against, run.why_not]))
        started = f"{run.row['started_at']:%Y-%m-%d %H:%M}"
        rows.append(
            [
                run.run_id,
                started,
                str(run.row["matrix"]),
                run.hardware,
                f"{run.verified} of {run.cells}",
                told,
            ]
        )
    return [table(columns, [], rows)]


def _cells(found: Runs) -> list[str]:
    columns = ["cell", "newest (samples/s)", *(f"newest / {run.run_id}" for run in found.shown)]
    rows = [[cell.cell_name, number(cell.speed), *map(_ratio, lines)] for cell, lines in found.rows]
    return ["Below 1 the newest is slower.", table(columns, columns[1:], rows)] if rows else []


def _ratio(line: ComparedCell | None) -> str:
    if line is None or line.throughput is None:
        return DASH
    found = line.throughput
    interval = "" if found.low is None else f" ({number(found.low)} to {number(found.high)})"
    return f"{number(found.ratio)}{interval}, {line.verdict}"


def _others(found: Runs) -> list[str]:
    rows = [[line.cell_name, run.run_id, line.verdict, line.said] for run, line in found.others]
    return (
        [
            "A is the other run, B the newest.",
            table(["cell", "newest against", "what", "why"], [], rows),
        ]
        if rows
        else []
    )


def _history(found: Runs) -> list[str]:
    columns = ["cell", "figure", "runs", "newest", "last change"]
    rows = []
    for one in found.series:
        unit, factor = trends.unit(one)
        half = one.newest.value.half_width
        newest = (
            f"{number(one.newest.value.value / factor)}"
            f" {unit}{'' if half is None else f' ± {number(half / factor, 2)}'}"
        )
        rows.append([one.cell_name, one.figure, str(len(one.points)), newest, _change(one)])
    few = [] if found.enough else [f"A change can be seen from {found.least} runs of a cell on."]
    return [*few, table(columns, columns[2:4], rows)] if rows else []


def _change(series: Series) -> str:
    last = series.last_change
    if last is None or last.change is None:
        return DASH
    return (
        f"{trends.change_words(series, last.change)} since {last.started_at:%Y-%m-%d},"
        f" {last.run_id}"
    )


def _method(found: Runs) -> list[str]:
    return ["\n".join(f"- {escaped(name)}: {escaped(said)}" for name, said in found.method.items())]


SECTIONS: dict[str, tuple[str, Callable[[Runs], list[str]]]] = {
    "verdict": ("Verdict", _verdict),
    "cells": ("Cells of the newest run against the others", _cells),
    "others": ("Without a comparison", _others),
    "history": ("History", _history),
    "method": ("How it was decided", _method),
}
