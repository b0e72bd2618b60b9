"""Comparison of cells by throughput: pairwise, and with the best.

Hsu, Simultaneous confidence intervals for all distances from the "best", Annals of Statistics 9
(1981); constrained intervals, Hsu, Journal of the American Statistical Association 79 (1984).
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.cell_result import CellResult
from harness.analysis.stats import (
    ACROSS_RUNS_CONFIDENCE,
    CONFIDENCE,
    WITHIN_RUN_CONFIDENCE,
    Comparison,
    LogEstimate,
    compare_rounds,
    compare_runs,
    ratio,
)


@dataclass(frozen=True)
class AgainstBest:
    """Simultaneous bounds on throughput over the best other cell's."""

    low: float
    """Lower bound, at most 1."""
    high: float
    """Upper bound, at least 1."""

    @property
    def may_be_best(self) -> bool:
        return self.high > 1


def against_best(cells: Sequence[LogEstimate], confidence: float = CONFIDENCE) -> list[AgainstBest]:
    """Returns bounds in the cells' order; a single cell is the best."""
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
    """Returns the difference of two log throughputs plus `factor` standard errors."""
    return cell.mean - other.mean + factor * math.hypot(cell.error, other.error)


def critical_value(
    cell: LogEstimate, cells: Sequence[LogEstimate], confidence: float = CONFIDENCE
) -> float:
    """Returns the standard errors at which differences from other cells are jointly significant."""
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
    """Returns Dunnett's one-sided critical value (Journal of the American Statistical Association
    50, 1955). This is the quantile of the largest of several t values with a common spread estimate
    and equal pairwise correlations."""
    import numpy as np
    from scipy.optimize import brentq
    from scipy.special import chdtri, ndtr

    shared, own = math.sqrt(correlation), math.sqrt(1 - correlation)
    shares = (np.arange(200) + 0.5) / 200
    # Quantiles of the estimated spread: root of chi-square over its degrees of freedom.
    spreads = np.sqrt(chdtri(degrees, 1 - shares) / degrees)
    points, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()

    def below(value: float) -> float:
        inner = ndtr((value * spreads[:, None] + shared * points[None, :]) / own) ** comparisons
        return float((inner * weights).sum(axis=1).mean())

    return float(brentq(lambda value: below(value) - confidence, 0.0, 60.0))


def compare(
    cell: CellResult, other: CellResult, confidence: float | None = None
) -> Comparison | None:
    """Returns a throughput ratio, within rounds if both cells are of one run; None without trials.

    `confidence`: None for the verdicts'.
    """
    one_run, by_turns = cell.run_id == other.run_id, cell.speed.turns and other.speed.turns
    if one_run and cell.speed.log_throughput and other.speed.log_throughput and not by_turns:
        return ratio(
            cell.speed.log_throughput,
            other.speed.log_throughput,
            confidence or WITHIN_RUN_CONFIDENCE,
        )
    confidence = confidence or ACROSS_RUNS_CONFIDENCE
    if one_run:
        return compare_rounds(
            cell.speed.by_round,
            other.speed.by_round,
            (cell.speed.turns, other.speed.turns),
            confidence,
        )
    return compare_runs(
        [*cell.speed.by_round.values()], [*other.speed.by_round.values()], confidence
    )


def is_tied(cell: CellResult, other: CellResult) -> bool:
    comparison = compare(cell, other)
    return comparison is None or comparison.verdict == "no difference seen"


def tied_with_previous(ranking: Sequence[CellResult]) -> list[bool]:
    pairs = itertools.pairwise(ranking)
    return [False, *(is_tied(cell, above) for above, cell in pairs)][: len(ranking)]
