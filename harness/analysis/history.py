"""A cell's figure over many runs on equal hardware, and where it changed for good."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from harness.analysis.compare import MEMORY_EFFECT
from harness.analysis.selection import Measured
from harness.analysis.stats import Estimate, estimate

if TYPE_CHECKING:
    from datetime import datetime

    import numpy as np

Figure = Literal["throughput", "memory"]

FALSE_ALARM_RATE = 0.01
SMALLEST_EFFECTS: dict[Figure, float] = {"throughput": 0.01, "memory": MEMORY_EFFECT}
MIN_RUNS = 3
MOST_RUNS = 250
METHOD = (
    "change points by binary segmentation: a stretch of runs is cut where the standardised rank"
    f" sum (Mann-Whitney) is largest, if fewer than {FALSE_ALARM_RATE / 2 * 100:g} % of shuffled"
    " series have as large a one (a permutation test of Pettitt's kind, Applied Statistics 28,"
    " 1979); else around the inner stretch that differs most from the rest, tested likewise"
    " (circular binary segmentation, Olshen and others, Biostatistics 5, 2004). So at most"
    f" {FALSE_ALARM_RATE * 100:g} % of series without a change are marked, however their noise is"
    f" distributed. Fewer than {MIN_RUNS} runs in a row, such as an outlying one, are no change"
)
_SHUFFLES = 1999


def change_points(values: Sequence[float], smallest: float) -> list[int]:
    """Where a new level begins: indices into `values`, ascending.

    `smallest`: relative change of the median that counts. See METHOD.
    """
    logs = [math.log(value) for value in values]
    found = _split(logs, 0, smallest)
    for i in range(len(found)):
        found[i] = _place(logs, ([0, *found])[i], found[i], ([*found, len(logs)])[i + 1])
    while found and (
        weak := [
            i
            for i, change in zip(found, _changes(logs, found), strict=True)
            if abs(change) < smallest
        ]
    ):
        found.remove(weak[0])
    return found


def _place(logs: Sequence[float], begin: int, cut: int, end: int) -> int:
    """Where two levels fit a stretch with one change best, by the sum of absolute deviations from
    their medians.

    A rank sum says whether there is a change; where it is, it says less well. A deviation counts at
    most as much as the change, so that an outlying run, which is far from both levels, has no say.
    """
    most = abs(statistics.median(logs[begin:cut]) - statistics.median(logs[cut:end]))

    def away(stretch: Sequence[float]) -> float:
        median = statistics.median(stretch)
        return sum(min(most, abs(value - median)) for value in stretch)

    return min(
        range(begin + MIN_RUNS, end - MIN_RUNS + 1),
        key=lambda k: away(logs[begin:k]) + away(logs[k:end]),
    )


def _split(logs: Sequence[float], offset: int, smallest: float) -> list[int]:
    """The change points of a stretch that begins at `offset`."""
    if len(logs) < 2 * MIN_RUNS:
        return []
    single, between = _statistics(_ranks(logs))
    critical_single, critical_between = _critical(len(logs))
    if single[0] > critical_single:
        edges = [single[1]]
    elif between[0] > critical_between:
        edges = [between[1], between[2]]
    else:
        return []
    if all(abs(change) < smallest for change in _changes(logs, edges)):
        return []
    cuts = [0, *edges, len(logs)]
    inside = [_split(logs[a:b], offset + a, smallest) for a, b in itertools.pairwise(cuts)]
    return sorted(
        [*(offset + edge for edge in edges), *(point for part in inside for point in part)]
    )


def _changes(logs: Sequence[float], edges: Sequence[int]) -> list[float]:
    """Relative change of the median at each edge, from the level before it."""
    cuts = [0, *edges, len(logs)]
    levels = [statistics.median(logs[a:b]) for a, b in itertools.pairwise(cuts)]
    return [math.expm1(after - before) for before, after in itertools.pairwise(levels)]


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks less their mean; equal values share theirs."""
    from scipy.stats import rankdata

    ranks: np.ndarray = rankdata(values) - (len(values) + 1) / 2
    return ranks


def _sums(ranks: np.ndarray) -> tuple[np.ndarray, Callable[[int], float]]:
    """Running sums along the last axis, from 0, and the standard deviation of a sum of so many
    ranks (Mann and Whitney 1947)."""
    import numpy as np

    n = ranks.shape[-1]
    sums = np.concatenate([np.zeros((*ranks.shape[:-1], 1)), np.cumsum(ranks, axis=-1)], axis=-1)
    return sums, lambda length: math.sqrt(length * (n - length) * (n + 1) / 12)


def _statistics(ranks: np.ndarray) -> tuple[tuple[float, int], tuple[float, int, int]]:
    """The best single split (statistic, index) and the best stretch in between (statistic, begin,
    end) of one series."""
    n = len(ranks)
    sums, deviation = _sums(ranks)
    single = max(
        (abs(sums[k]) / deviation(k), -abs(2 * k - n), k) for k in range(MIN_RUNS, n - MIN_RUNS + 1)
    )
    between = (0.0, 0, 0)
    for length in range(MIN_RUNS, n - 2 * MIN_RUNS + 1):
        for begin in range(MIN_RUNS, n - MIN_RUNS - length + 1):
            found = float(abs(sums[begin + length] - sums[begin])) / deviation(length)
            between = max(between, (found, begin, begin + length))
    return (float(single[0]), single[2]), between


@functools.cache
def _critical(n: int) -> tuple[float, float]:
    """What the two statistics exceed in half of FALSE_ALARM_RATE of shuffled series each; ranks
    make them depend on `n` alone."""
    import numpy as np

    order = np.random.default_rng(n).permuted(
        np.tile(np.arange(n) - (n - 1) / 2, (_SHUFFLES, 1)), axis=1
    )
    sums, deviation = _sums(order)
    single, between = np.zeros(_SHUFFLES), np.zeros(_SHUFFLES)
    for k in range(MIN_RUNS, n - MIN_RUNS + 1):
        np.maximum(single, np.abs(sums[:, k]) / deviation(k), out=single)
    for length in range(MIN_RUNS, n - 2 * MIN_RUNS + 1):
        stretches = (
            sums[:, MIN_RUNS + length : n - MIN_RUNS + 1]
            - sums[:, MIN_RUNS : n - MIN_RUNS + 1 - length]
        )
        np.maximum(between, np.abs(stretches).max(axis=1) / deviation(length), out=between)
    place = math.ceil((_SHUFFLES + 1) * (1 - FALSE_ALARM_RATE / 2)) - 1
    return float(np.sort(single)[place]), float(np.sort(between)[place])


@dataclass(frozen=True)
class Point:
    """One run's figure of a cell."""

    run_id: str
    started_at: datetime
    value: Estimate
    change: float | None = None
    """Where a new level begins: the relative change of the median from the level before."""


@dataclass(frozen=True)
class Series:
    """A cell's figure over its runs, oldest first, on the hardware of the newest."""

    cell_id: str
    cell_name: str
    figure: Figure
    points: tuple[Point, ...]
    elsewhere: int = 0
    """Runs on other hardware, or with another method of measuring memory, left out."""
    failed: int = 0
    """Runs in which the cell failed, diverged or was not verified, left out."""

    @property
    def newest(self) -> Point:
        return self.points[-1]

    @property
    def last_change(self) -> Point | None:
        return next((point for point in reversed(self.points) if point.change is not None), None)

    def as_json(self) -> dict[str, Any]:
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


def histories(cells: Sequence[Measured], figure: Figure) -> list[Series]:
    """One series for each cell that has a figure, in the order in which they are first seen.

    `cells`: oldest run first.
    """
    found = []
    for cell_id in dict.fromkeys(one.cell_id for one in cells):
        every = [one for one in cells if one.cell_id == cell_id]
        good = [one for one in every if one.ok and (figure == "throughput" or one.peaks)]
        if not good:
            continue
        newest = good[-1]
        alike = [one for one in good if _alike(one, newest, figure)][-MOST_RUNS:]
        values = [
            estimate(list((one.speeds if figure == "throughput" else one.peaks).values()))
            for one in alike
        ]
        edges = change_points([value.value for value in values], SMALLEST_EFFECTS[figure])
        changes = dict(
            zip(edges, _changes([math.log(value.value) for value in values], edges), strict=True)
        )
        points = [
            Point(one.run_id, one.started_at, v, changes.get(i))
            for i, (one, v) in enumerate(zip(alike, values, strict=True))
        ]
        elsewhere = sum(not _alike(one, newest, figure) for one in good)
        found.append(
            Series(
                cell_id, newest.cell_name, figure, tuple(points), elsewhere, len(every) - len(good)
            )
        )
    return found


def _alike(one: Measured, other: Measured, figure: Figure) -> bool:
    same = figure == "throughput" or one.memory_method == other.memory_method
    return same and not one.hardware.difference(other.hardware, one.device)


def method(figure: Figure) -> dict[str, str]:
    """How changes are marked: every format says this."""
    return {
        "Value": "median over a run's trials; the interval is of 95 %",
        "Test": METHOD,
        "Smallest effect that counts": f"{SMALLEST_EFFECTS[figure] * 100:g} % of the level before",
        "False alarms": f"at most {FALSE_ALARM_RATE * 100:g} % of cells without a change",
    }
