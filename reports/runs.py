"""Several runs on one page: the newest against each of the others, and every cell's figures over
all of them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.analysis.compare import RUNS_METHOD, ComparedCell, RunComparison, compare_sides
from harness.analysis.history import MIN_RUNS, Series, histories, method
from harness.analysis.selection import Measured, measured, side
from harness.spec.errors import UsageError
from reports import facts, trends
from reports.groups import Row, records
from reports.run_report import only
from reports.svg import Picture, Pictures

if TYPE_CHECKING:
    from harness.record.store import Results

MOST_COLUMNS = 6
"""Runs that the newest is compared with side by side; older ones are in the history."""
MOST_CHARTS = 60


@dataclass(frozen=True)
class Run:
    """One of the runs, and what the newest is against it."""

    row: Row
    hardware: str
    verified: int
    cells: int
    against: RunComparison | None
    """None of the newest run itself, and where the two have no cell in common."""
    why_not: str = ""
    """Why nothing or not everything is compared."""

    @property
    def run_id(self) -> str:
        return str(self.row["run_id"])


@dataclass(frozen=True)
class Chart:
    series: Series
    picture: Picture


@dataclass(frozen=True)
class Runs:
    """Everything that the page shows; runs oldest first."""

    runs: tuple[Run, ...]
    shown: tuple[Run, ...]
    """Those that have a column, newest first, without the newest."""
    throughput: tuple[Series, ...]
    memory: tuple[Series, ...]
    charts: tuple[Chart, ...]
    styles: str

    @property
    def newest(self) -> Run:
        return self.runs[-1]

    @property
    def series(self) -> list[Series]:
        """Those of throughput and of memory, a cell's two beside each other."""
        return sorted((*self.throughput, *self.memory), key=lambda one: one.cell_name)

    @property
    def changed(self) -> list[Series]:
        """Series whose level changed, the latest change first."""
        found = [(one.last_change.started_at, one) for one in self.series if one.last_change]
        return [one for _, one in sorted(found, key=lambda pair: pair[0], reverse=True)]

    @property
    def older(self) -> tuple[Run, ...]:
        """Runs without a column, newest first."""
        return tuple(reversed(self.runs[: -1 - len(self.shown)]))

    @property
    def enough(self) -> bool:
        """Whether a change could be seen at all."""
        return max((len(one.points) for one in self.throughput), default=0) >= 2 * MIN_RUNS

    @property
    def least(self) -> int:
        """Runs of a cell from which on a change can be seen."""
        return 2 * MIN_RUNS

    @functools.cached_property
    def rows(self) -> list[tuple[Measured, list[ComparedCell | None]]]:
        """Each cell of the newest run that is compared, by name, with its line for each of the
        shown runs."""
        found: dict[str, tuple[Measured, list[ComparedCell | None]]] = {}
        for place, run in enumerate(self.shown):
            for line in run.against.lines if run.against else ():
                if line.throughput and line.second:
                    row = found.setdefault(
                        line.second.cell_id, (line.second, [None] * len(self.shown))
                    )
                    row[1][place] = line
        return sorted(found.values(), key=lambda row: row[0].cell_name)

    @property
    def others(self) -> list[tuple[Run, ComparedCell]]:
        """What could not be compared by throughput, findings first."""
        found = [
            (run, line)
            for run in self.shown
            if run.against
            for line in run.against.lines
            if not line.throughput
        ]
        return sorted(found, key=lambda pair: not pair[1].regression)

    @property
    def method(self) -> dict[str, str]:
        compared = {"Test": RUNS_METHOD} | next(
            (run.against.method for run in self.shown if run.against), {}
        )
        told = {f"History: {name.lower()}": said for name, said in method("throughput").items()}
        return compared | told


def compare_all(results: Results) -> Runs:
    """The runs of a store's frames against each other.

    Raises UsageError where fewer than two of them measured cells.
    """
    known = measured(results)
    counted = {
        run_id: list(found)
        for run_id, found in itertools.groupby(known, key=lambda one: one.run_id)
    }
    rows = [row for row in records(results.runs) if row["run_id"] in counted]
    if len(rows) < 2:
        told = ", ".join(str(row["run_id"]) for row in rows) or "none"
        raise UsageError(
            f"comparing takes two runs with recorded trials of a matrix; there is {told} (a search"
            " for the largest model is none)"
        )
    newest = side(str(rows[-1]["run_id"]), only(results, [rows[-1]["run_id"]]))
    first_shown = max(0, len(rows) - 1 - MOST_COLUMNS)
    runs = []
    for place, row in enumerate(rows):
        run_id = str(row["run_id"])
        against, why_not = None, ""
        if first_shown <= place < len(rows) - 1:
            try:
                against = compare_sides(side(run_id, only(results, [run_id])), newest)
                if row["matrix"] != rows[-1]["matrix"]:
                    against, why_not = _shared(against)
            except UsageError as mistake:
                why_not = str(mistake)
        cells = counted[run_id]
        runs.append(
            Run(
                row, facts.hardware(row), sum(one.ok for one in cells), len(cells), against, why_not
            )
        )
    throughput, memory = tuple(histories(known, "throughput")), tuple(histories(known, "memory"))
    charts, styles = _charts((*throughput, *memory))
    return Runs(
        tuple(runs), tuple(reversed(runs[first_shown:-1])), throughput, memory, charts, styles
    )


def _shared(found: RunComparison) -> tuple[RunComparison, str]:
    """The comparison of two matrices without the cells that only one of them has, and how many
    these are."""
    kept = tuple(line for line in found.lines if line.first and line.second)
    return (
        dataclasses.replace(found, lines=kept),
        f"of another matrix: {len(found.lines) - len(kept)} cells are in one of the two only",
    )


def _charts(found: Sequence[Series]) -> tuple[tuple[Chart, ...], str]:
    """Throughput of every cell of several runs, what changed first; memory where it changed."""
    several = [
        one
        for one in found
        if len(one.points) > 1 and (one.figure == "throughput" or one.last_change)
    ]
    several.sort(key=lambda one: one.last_change is None)
    pictures = Pictures()
    charts = []
    for place, series in enumerate(several[:MOST_CHARTS]):
        data = trends.trend(series, f"trend-{place}")
        charts.append(Chart(series, pictures.add(trends.draw, data)))
    pictures.draw()
    return tuple(charts), pictures.styles


def page(found: Runs) -> str:
    """One HTML page that loads nothing and runs nothing but its own script."""
    from reports.page import fill

    return fill("runs.html.j2", found.styles, view=found, trends=trends)


def as_json(found: Runs) -> dict[str, Any]:
    """Comparisons of the newest run with the others, and the histories."""
    compared = [run.against.as_json() for run in found.shown if run.against]
    return {"comparisons": compared, "history": [one.as_json() for one in found.series]}
