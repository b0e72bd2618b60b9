"""History of a cell on equal hardware, with lasting changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from harness.analysis.change_points import (
    FALSE_ALARM_RATE,
    METHOD,
    change_points,
    relative_changes,
)
from harness.analysis.compared_cell import MEMORY_EFFECT
from harness.analysis.selection import MeasuredCell
from harness.analysis.stats import Estimate, estimate

if TYPE_CHECKING:
    from datetime import datetime

Figure = Literal["throughput", "memory"]

SMALLEST_EFFECTS: dict[Figure, float] = {"throughput": 0.01, "memory": MEMORY_EFFECT}
"""Smallest relative change of the level that counts."""
MOST_RUNS = 250
"""Number of newest runs of a cell that are used."""


@dataclass(frozen=True)
class Point:
    run_id: str
    started_at: datetime
    value: Estimate
    change: float | None = None
    """Relative change of the median if a new level begins here."""


@dataclass(frozen=True)
class Series:
    """Measurements of a cell by run, oldest first, on the newest run's hardware."""

    cell_id: str
    cell_name: str
    figure: Figure
    points: tuple[Point, ...]
    elsewhere: int = 0
    """Number of runs left out for other hardware or memory methods."""
    failed: int = 0
    """Number of runs left out because the cell was not ok."""

    @property
    def newest(self) -> Point:
        return self.points[-1]

    @property
    def last_change(self) -> Point | None:
        return next((point for point in reversed(self.points) if point.change is not None), None)

    def as_json(self) -> dict[str, object]:
        points = [
            {
                "run_id": point.run_id,
                "started_at": point.started_at.isoformat(),
                "value": point.value.value,
                "low": point.value.low,
                "high": point.value.high,
                "trials": point.value.trials,
                "change": point.change,
            }
            for point in self.points
        ]
        last = self.last_change
        return {
            "cell_id": self.cell_id,
            "cell_name": self.cell_name,
            "figure": self.figure,
            "unit": "samples/s" if self.figure == "throughput" else "bytes",
            "newest": self.newest.value.value,
            "last_change": last and last.change,
            "last_change_run": last and last.run_id,
            "runs_elsewhere": self.elsewhere,
            "runs_not_ok": self.failed,
            "points": points,
        }


def histories(cells: Sequence[MeasuredCell], figure: Figure) -> list[Series]:
    """Returns a series per measured cell, in order of first occurrence. `cells`: oldest run
    first."""
    by_id: dict[str, list[MeasuredCell]] = {}
    for cell in cells:
        by_id.setdefault(cell.cell_id, []).append(cell)
    return [series for every in by_id.values() if (series := _series(every, figure))]


def _series(every: Sequence[MeasuredCell], figure: Figure) -> Series | None:
    good = [cell for cell in every if cell.ok and _by_round(cell, figure)]
    if not good:
        return None
    newest = good[-1]
    same = [cell for cell in good if _comparable(cell, newest, figure)]
    shown = same[-MOST_RUNS:]
    values = [estimate([*_by_round(cell, figure).values()]) for cell in shown]
    edges = change_points([value.value for value in values], SMALLEST_EFFECTS[figure])
    logs = [math.log(value.value) for value in values]
    changes = dict(zip(edges, relative_changes(logs, edges), strict=True))
    points = tuple(
        Point(cell.run_id, cell.started_at, value, changes.get(place))
        for place, (cell, value) in enumerate(zip(shown, values, strict=True))
    )
    elsewhere, failed = len(good) - len(same), len(every) - len(good)
    return Series(newest.cell_id, newest.cell_name, figure, points, elsewhere, failed)


def _by_round(cell: MeasuredCell, figure: Figure) -> Mapping[int, float]:
    return (
        cell.result.speed.by_round if figure == "throughput" else cell.result.memory.peak_by_round
    )


def _comparable(cell: MeasuredCell, other: MeasuredCell, figure: Figure) -> bool:
    same_method = cell.result.memory.memory_method == other.result.memory.memory_method
    return (figure == "throughput" or same_method) and cell.comparable(other)


def method(figure: Figure) -> dict[str, str]:
    """Describes the detection of changes, for every output format."""
    return {
        "Value": "median over a run's trials; the interval is of 95 %",
        "Test": METHOD,
        "Smallest effect that counts": f"{SMALLEST_EFFECTS[figure] * 100:g} % of the level before",
        "False alarms": f"at most {FALSE_ALARM_RATE * 100:g} % of cells without a change",
    }
