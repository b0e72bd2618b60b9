"""Detection of lasting level changes in a series."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

FALSE_ALARM_RATE = 0.01
MIN_RUNS = 3
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
    """Returns the indices at which a new level begins, ascending. See METHOD.

    `smallest`: relative change of the median that counts.
    """
    logs = [math.log(value) for value in values]
    edges = _split(logs, 0, smallest)
    for i in range(len(edges)):
        edges[i] = _place(logs, ([0, *edges])[i], edges[i], ([*edges, len(logs)])[i + 1])
    while edges and (
        weak := [
            i
            for i, change in zip(edges, relative_changes(logs, edges), strict=True)
            if abs(change) < smallest
        ]
    ):
        edges.remove(weak[0])
    return edges


def _place(logs: Sequence[float], begin: int, cut: int, end: int) -> int:
    """Returns the split that minimises absolute deviations from both medians.

    A rank sum detects a change but locates it less well. Deviations are capped at the size of the
    change, so that outlying runs have no influence.
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
    if all(abs(change) < smallest for change in relative_changes(logs, edges)):
        return []
    cuts = [0, *edges, len(logs)]
    inside = [_split(logs[a:b], offset + a, smallest) for a, b in itertools.pairwise(cuts)]
    return sorted(
        [*(offset + edge for edge in edges), *(point for part in inside for point in part)]
    )


def relative_changes(logs: Sequence[float], edges: Sequence[int]) -> list[float]:
    """Returns the relative change of the median at each edge."""
    cuts = [0, *edges, len(logs)]
    levels = [statistics.median(logs[a:b]) for a, b in itertools.pairwise(cuts)]
    return [math.expm1(after - before) for before, after in itertools.pairwise(levels)]


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Returns centred ranks; equal values share a rank."""
    from scipy.stats import rankdata

    ranks: np.ndarray = rankdata(values) - (len(values) + 1) / 2
    return ranks


def _sums(ranks: np.ndarray) -> tuple[np.ndarray, Callable[[int], float]]:
    """Returns running sums from 0 along the last axis, and the standard deviation of a sum of n
    ranks (Mann and Whitney 1947)."""
    import numpy as np

    n = ranks.shape[-1]
    sums = np.concatenate([np.zeros((*ranks.shape[:-1], 1)), np.cumsum(ranks, axis=-1)], axis=-1)
    return sums, lambda length: math.sqrt(length * (n - length) * (n + 1) / 12)


def _statistics(ranks: np.ndarray) -> tuple[tuple[float, int], tuple[float, int, int]]:
    """Returns the best split (statistic, index) and inner stretch (statistic, begin, end)."""
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
def _critical(n: int) -> tuple[float, float]:
    """Returns critical values at half of FALSE_ALARM_RATE each; with ranks they depend on `n`
    alone."""
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
