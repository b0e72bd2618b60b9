"""Which cells may be the best, and how far every other one is behind: for all cells at once.

Multiple comparisons with the best: Hsu, Simultaneous confidence intervals for all distances from
the "best", Annals of Statistics 9 (1981); constrained intervals, Hsu, Journal of the American
Statistical Association 79 (1984).
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.stats import CONFIDENCE, LogEstimate


@dataclass(frozen=True)
class AgainstBest:
    """A cell's throughput over that of the best other cell: bounds that hold for all cells of the
    comparison at once with the confidence that was asked for."""

    low: float
    """At most 1: it is not slower than this."""
    high: float
    """At least 1: it is not faster than this."""

    @property
    def may_be_best(self) -> bool:
        return self.high > 1


def against_best(cells: Sequence[LogEstimate], confidence: float = CONFIDENCE) -> list[AgainstBest]:
    """Of each cell, in their order; a single one is the best."""
    if len(cells) < 2:
        return [AgainstBest(1.0, 1.0001)] * len(cells)
    factors = [critical_value(cell, cells, confidence) for cell in cells]
    highs = [
        max(0.0, min(_gap(cell, other, factor) for other in cells if other is not cell))
        for cell, factor in zip(cells, factors, strict=True)
    ]
    candidates = [cell for cell, high in zip(cells, highs, strict=True) if high > 0]
    bounds = []
    for cell, factor, high in zip(cells, factors, highs, strict=True):
        others = [other for other in candidates if other is not cell]
        low = min((_gap(cell, other, -factor) for other in others), default=0.0)
        bounds.append(AgainstBest(math.exp(min(0.0, low)), math.exp(high)))
    return bounds


def _gap(cell: LogEstimate, other: LogEstimate, factor: float) -> float:
    """By how much a cell's logarithm is above another's, and so many standard errors."""
    return cell.mean - other.mean + factor * math.hypot(cell.error, other.error)


def critical_value(
    cell: LogEstimate, cells: Sequence[LogEstimate], confidence: float = CONFIDENCE
) -> float:
    """Standard errors above which no difference of a cell from another one is by chance, with this
    confidence for all of them together."""
    others = [other.error for other in cells if other is not cell]
    usual = statistics.median(others)
    total = cell.error**2 + usual**2
    shared = cell.error**2 / total if total else 0.5
    degrees = statistics.median(each.degrees for each in cells)
    return dunnett(
        len(others), max(1, round(min(degrees, 1000.0))), min(0.9, round(shared, 1)), confidence
    )


@functools.cache
def dunnett(
    comparisons: int, degrees: int, correlation: float, confidence: float = CONFIDENCE
) -> float:
    """Dunnett's one-sided critical value (Journal of the American Statistical Association 50,
    1955): the quantile of the largest of so many t values with a common estimate of the spread, any
    two of which correlate so."""
    import numpy as np
    from scipy.optimize import brentq
    from scipy.special import chdtri, ndtr

    shared, own = math.sqrt(correlation), math.sqrt(1 - correlation)
    shares = (np.arange(200) + 0.5) / 200
    # Quantiles of a chi-square over its degrees of freedom, whose root is the estimated spread.
    spreads = np.sqrt(chdtri(degrees, 1 - shares) / degrees)
    points, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()

    def below(value: float) -> float:
        inner = ndtr((value * spreads[:, None] + shared * points[None, :]) / own) ** comparisons
        return float((inner * weights).sum(axis=1).mean())

    return float(brentq(lambda value: below(value) - confidence, 0.0, 60.0))
