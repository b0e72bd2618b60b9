"""Compares the newest run with each of the others, with the history of every cell."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.analysis.compare import RUNS_METHOD, ComparedCell, RunComparison, compare_sides
from harness.analysis.history import MIN_RUNS, Series, histories, method
from harness.analysis.selection import MeasuredCell, RunSelection, measured, select
from harness.record.run import RunRecord
from harness.spec.errors import UsageError
from reports import facts
from reports.run_report import only

if TYPE_CHECKING:
    from harness.record.store import Results

MOST_COLUMNS = 6
"""Runs that the newest is compared with side by side; older ones are in the history."""


@dataclass(frozen=True)
class Run:
    """A run, and its comparison with the newest."""

    row: RunRecord
    hardware: str
    verified: int
    cells: int
    against: RunComparison | None
    """None for the newest run itself, or without a cell in common."""
    why_not: str = ""
    """Why nothing or not everything is compared."""

    @property
    def run_id(self) -> str:
        return self.row.run_id


ComparedRow = tuple[MeasuredCell, list["ComparedCell | None"]]
"""A cell of the newest run, with its comparison for each run with a column."""


@dataclass(frozen=True)
class Runs:
    """Several runs, oldest first."""

    runs: tuple[Run, ...]
    shown: tuple[Run, ...]
    """Runs with a column, newest first, without the newest."""
    throughput: tuple[Series, ...]
    memory: tuple[Series, ...]

    @property
    def newest(self) -> Run:
        return self.runs[-1]

    @property
    def series(self) -> list[Series]:
        """Series of throughput and memory, a cell's two next to each other."""
        return sorted((*self.throughput, *self.memory), key=lambda series: series.cell_name)

    @property
    def changed(self) -> list[Series]:
        """Series whose level changed, latest change first."""
        changes = [(s.last_change.started_at, s) for s in self.series if s.last_change]
        return [s for _, s in sorted(changes, key=lambda pair: pair[0], reverse=True)]

    @property
    def older(self) -> tuple[Run, ...]:
        """Runs without a column, newest first."""
        return tuple(reversed(self.runs[: -1 - len(self.shown)]))

    @property
    def enough(self) -> bool:
        """Whether there are enough runs to detect a change."""
        return max((len(series.points) for series in self.throughput), default=0) >= self.least

    @property
    def least(self) -> int:
        """Fewest runs of a cell that can show a change."""
        return 2 * MIN_RUNS

    @functools.cached_property
    def rows(self) -> list[ComparedRow]:
        rows: dict[str, ComparedRow] = {}
        for place, run in enumerate(self.shown):
            for line in run.against.lines if run.against else ():
                if line.throughput and line.second:
                    empty: ComparedRow = (line.second, [None] * len(self.shown))
                    rows.setdefault(line.second.cell_id, empty)[1][place] = line
        return sorted(rows.values(), key=lambda row: row[0].cell_name)

    @property
    def others(self) -> list[tuple[Run, ComparedCell]]:
        """Cells without a throughput comparison, regressions first."""
        lines = [
            (run, line)
            for run in self.shown
            if run.against
            for line in run.against.lines
            if not line.throughput
        ]
        return sorted(lines, key=lambda pair: not pair[1].regression)

    @property
    def method(self) -> dict[str, str]:
        compared = {"Test": RUNS_METHOD} | next(
            (run.against.method for run in self.shown if run.against), {}
        )
        history = {f"History: {name.lower()}": text for name, text in method("throughput").items()}
        return compared | history


def compare_all(results: Results) -> Runs:
    """Raises UsageError if fewer than two runs measured cells."""
    cells: dict[str, list[MeasuredCell]] = {}
    every = measured(results)
    for cell in every:
        cells.setdefault(cell.run_id, []).append(cell)
    records = [run for run in RunRecord.from_frame(results.runs) if run.run_id in cells]
    if len(records) < 2:
        there = ", ".join(run.run_id for run in records) or "none"
        raise UsageError(
            f"comparing takes two runs with recorded trials of a matrix; there is {there} (a search"
            " for the largest model is none)"
        )
    newest = records[-1]
    side = select(newest.run_id, only(results, [newest.run_id]))
    first_shown = max(0, len(records) - 1 - MOST_COLUMNS)
    runs = []
    for place, record in enumerate(records):
        against, why_not = None, ""
        if first_shown <= place < len(records) - 1:
            against, why_not = _against(results, record, newest, side)
        runs.append(_run(record, cells, against, why_not))
    return Runs(
        tuple(runs),
        tuple(reversed(runs[first_shown:-1])),
        tuple(histories(every, "throughput")),
        tuple(histories(every, "memory")),
    )


def _run(
    record: RunRecord,
    cells: Mapping[str, Sequence[MeasuredCell]],
    against: RunComparison | None,
    why_not: str,
) -> Run:
    own = cells[record.run_id]
    verified = sum(cell.ok for cell in own)
    return Run(record, facts.hardware(record), verified, len(own), against, why_not)


def _against(
    results: Results, record: RunRecord, newest: RunRecord, side: RunSelection
) -> tuple[RunComparison | None, str]:
    """Returns the comparison of the newest run with another, and why it is missing or
    incomplete."""
    try:
        other = select(record.run_id, only(results, [record.run_id]))
        comparison = compare_sides(other, side)
    except UsageError as error:
        return None, str(error)
    if record.matrix == newest.matrix:
        return comparison, ""
    both = tuple(line for line in comparison.lines if line.first and line.second)
    rest = len(comparison.lines) - len(both)
    why_not = f"of another matrix: {rest} cells are in one of the two only"
    return dataclasses.replace(comparison, lines=both), why_not


def as_json(runs: Runs) -> dict[str, object]:
    compared = [run.against.as_json() for run in runs.shown if run.against]
    return {"comparisons": compared, "history": [series.as_json() for series in runs.series]}
