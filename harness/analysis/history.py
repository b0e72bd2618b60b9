"""History of a cell on equal hardware, with its lasting changes."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from harness.analysis.compare import MEMORY_EFFECT
from harness.analysis.selection import MeasuredCell
from harness.analysis.setting import grouped
from harness.analysis.stats import Estimate, estimate

if TYPE_CHECKING:
    from datetime import datetime

    import numpy as np

FALSE_ALARM_RATE = 0.01
MIN_RUNS = 3
METHOD = (
    "change points by binary segmentation. A series is cut where the standardised rank sum"
    f" (Mann-Whitney) is largest, if fewer than {FALSE_ALARM_RATE / 2 * 100:g}% of shuffled"
    " series reach that value (a permutation test like Pettitt's, Applied Statistics 28, 1979)."
    " Otherwise, it is cut around the inner stretch that differs most from the rest, tested in the"
    " same way (circular binary segmentation, Olshen and others, Biostatistics 5, 2004). At most"
    f" {FALSE_ALARM_RATE * 100:g}% of series without a change are marked, whatever the"
    f" distribution of their noise. Fewer than {MIN_RUNS} runs in a row do not count as a change"
)
_SHUFFLES = 1999


def change_points(
    values: Sequence[float], smallest: float, false_alarm_rate: float = FALSE_ALARM_RATE
) -> list[int]:
    """Returns ascending indices at which new levels begin; see METHOD. `smallest`: relative change
    of the median from which a change counts. `false_alarm_rate`: share of series without a change
    that may be marked."""
    logs = [math.log(value) for value in values]
    edges = _split(logs, 0, smallest, false_alarm_rate)
    for i in range(len(edges)):
        edges[i] = _refined(logs, ([0, *edges])[i], edges[i], ([*edges, len(logs)])[i + 1])
    while edges and (
        weak := [
            i
            for i, change in zip(edges, relative_changes(logs, edges), strict=True)
            if abs(change) < smallest
        ]
    ):
        edges.remove(weak[0])
    return edges


def _refined(logs: Sequence[float], begin: int, cut: int, end: int) -> int:
    """Returns the split with the least absolute deviations from both medians. A rank sum detects
    changes, but locates them less well. Deviations are capped at the size of the change, so that
    outlying runs have no influence."""
    most = abs(statistics.median(logs[begin:cut]) - statistics.median(logs[cut:end]))

    def away(stretch: Sequence[float]) -> float:
        median = statistics.median(stretch)
        return sum(min(most, abs(value - median)) for value in stretch)

    return min(
        range(begin + MIN_RUNS, end - MIN_RUNS + 1),
        key=lambda k: away(logs[begin:k]) + away(logs[k:end]),
    )


def _split(logs: Sequence[float], offset: int, smallest: float, rate: float) -> list[int]:
    if len(logs) < 2 * MIN_RUNS:
        return []
    single, between = _statistics(_ranks(logs))
    critical_single, critical_between = _critical(len(logs), rate)
    if single[0] > critical_single:
        edges = [single[1]]
    elif between[0] > critical_between:
        edges = [between[1], between[2]]
    else:
        return []
    if all(abs(change) < smallest for change in relative_changes(logs, edges)):
        return []
    cuts = [0, *edges, len(logs)]
    inside = [_split(logs[a:b], offset + a, smallest, rate) for a, b in itertools.pairwise(cuts)]
    return sorted(
        [*(offset + edge for edge in edges), *(point for part in inside for point in part)]
    )


def relative_changes(logs: Sequence[float], edges: Sequence[int]) -> list[float]:
    cuts = [0, *edges, len(logs)]
    levels = [statistics.median(logs[a:b]) for a, b in itertools.pairwise(cuts)]
    return [math.expm1(after - before) for before, after in itertools.pairwise(levels)]


def _ranks(values: Sequence[float]) -> np.ndarray:
    from scipy.stats import rankdata

    ranks: np.ndarray = rankdata(values) - (len(values) + 1) / 2
    return ranks


def _sums(ranks: np.ndarray) -> tuple[np.ndarray, Callable[[int], float]]:
    """Returns running sums along the last axis, from 0, and the standard deviation of a sum of n
    ranks (Mann and Whitney 1947)."""
    import numpy as np

    n = ranks.shape[-1]
    sums = np.concatenate([np.zeros((*ranks.shape[:-1], 1)), np.cumsum(ranks, axis=-1)], axis=-1)
    return sums, lambda length: math.sqrt(length * (n - length) * (n + 1) / 12)


def _statistics(ranks: np.ndarray) -> tuple[tuple[float, int], tuple[float, int, int]]:
    n = len(ranks)
    sums, deviation = _sums(ranks)
    single = max(
        (abs(sums[k]) / deviation(k), -abs(2 * k - n), k) for k in range(MIN_RUNS, n - MIN_RUNS + 1)
    )
    between = (0.0, 0, 0)
    for length in range(MIN_RUNS, n - 2 * MIN_RUNS + 1):
        for begin in range(MIN_RUNS, n - MIN_RUNS - length + 1):
            statistic = float(abs(sums[begin + length] - sums[begin])) / deviation(length)
            between = max(between, (statistic, begin, begin + length))
    return (float(single[0]), single[2]), between


@functools.cache
def _critical(n: int, rate: float) -> tuple[float, float]:
    """Returns the critical values of both statistics, with half of the false alarms for each."""
    import numpy as np

    shuffles = max(_SHUFFLES, math.ceil(4 / rate))
    order = np.random.default_rng(n).permuted(
        np.tile(np.arange(n) - (n - 1) / 2, (shuffles, 1)), axis=1
    )
    sums, deviation = _sums(order)
    single, between = np.zeros(shuffles), np.zeros(shuffles)
    for k in range(MIN_RUNS, n - MIN_RUNS + 1):
        np.maximum(single, np.abs(sums[:, k]) / deviation(k), out=single)
    for length in range(MIN_RUNS, n - 2 * MIN_RUNS + 1):
        stretches = (
            sums[:, MIN_RUNS + length : n - MIN_RUNS + 1]
            - sums[:, MIN_RUNS : n - MIN_RUNS + 1 - length]
        )
        np.maximum(between, np.abs(stretches).max(axis=1) / deviation(length), out=between)
    index = math.ceil((shuffles + 1) * (1 - rate / 2)) - 1
    return float(np.sort(single)[index]), float(np.sort(between)[index])


Figure = Literal["throughput", "memory"]

SMALLEST_EFFECTS: dict[Figure, float] = {"throughput": 0.01, "memory": MEMORY_EFFECT}
MOST_RUNS = 250


@dataclass(frozen=True)
class HistoryPoint:
    run_id: str
    started_at: datetime
    value: Estimate
    change: float | None = None
    """Relative change of the median if a new level begins."""


@dataclass(frozen=True)
class Series:
    """A cell's measurements by run, oldest first, on equal hardware."""

    cell_id: str
    cell_name: str
    figure: Figure
    points: tuple[HistoryPoint, ...]
    elsewhere: int = 0
    """Number of runs that are left out because their hardware or memory method differs."""
    failed: int = 0

    @property
    def newest(self) -> HistoryPoint:
        return self.points[-1]

    @property
    def last_change(self) -> HistoryPoint | None:
        return next((point for point in reversed(self.points) if point.change is not None), None)

    @property
    def worse(self) -> bool:
        """Whether the last change was to less throughput or more memory."""
        change = (self.last_change and self.last_change.change) or 0.0
        return change < 0 if self.figure == "throughput" else change > 0

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


def histories(
    cells: Sequence[MeasuredCell], figure: Figure, false_alarm_rate: float = FALSE_ALARM_RATE
) -> list[Series]:
    """Returns one series per cell. `cells`: from the oldest run to the newest."""
    by_id = grouped(cells, lambda cell: cell.cell_id)
    found = (_series(every, figure, false_alarm_rate) for every in by_id.values())
    return [series for series in found if series]


def _series(every: Sequence[MeasuredCell], figure: Figure, rate: float) -> Series | None:
    good = [cell for cell in every if cell.ok and _by_round(cell, figure)]
    if not good:
        return None
    newest = good[-1]
    measured_by = newest.result.memory.memory_method
    same = [
        cell
        for cell in good
        if (figure == "throughput" or cell.result.memory.memory_method == measured_by)
        and cell.comparable(newest)
    ]
    recent = same[-MOST_RUNS:]
    values = [estimate([*_by_round(cell, figure).values()]) for cell in recent]
    edges = change_points([value.value for value in values], SMALLEST_EFFECTS[figure], rate)
    logs = [math.log(value.value) for value in values]
    changes = dict(zip(edges, relative_changes(logs, edges), strict=True))
    points = tuple(
        HistoryPoint(cell.run_id, cell.started_at, value, changes.get(index))
        for index, (cell, value) in enumerate(zip(recent, values, strict=True))
    )
    elsewhere, failed = len(good) - len(same), len(every) - len(good)
    return Series(newest.cell_id, newest.cell_name, figure, points, elsewhere, failed)


def _by_round(cell: MeasuredCell, figure: Figure) -> Mapping[int, float]:
    return (
        cell.result.speed.by_round if figure == "throughput" else cell.result.memory.peak_by_round
    )


def method(figure: Figure) -> dict[str, str]:
    return {
        "Value": "median over a run's trials, with a 95% interval",
        "Test": METHOD,
        "Smallest effect that counts": f"{SMALLEST_EFFECTS[figure] * 100:g}% of the level before",
        "False alarms": f"at most {FALSE_ALARM_RATE * 100:g}% of cells without a change",
    }
