"""Spreads of cells with few launches each, moderated over all cells of a run.

Smyth, Linear models and empirical Bayes methods, Statistical Applications in Genetics and Molecular
Biology 3 (2004), sections 3 and 6.2: variances of cells are taken to scatter about a common one as
a scaled inverse chi-square with so many degrees of freedom; both are estimated from the run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """A variance, and with how many degrees of freedom it is known."""

    variance: float
    degrees: float


def moderated(spreads: Sequence[Spread]) -> list[Spread]:
    """Each cell's variance drawn towards the common one, in the cells' order.

    Cells without a degree of freedom get the common one. Where fewer than three cells have some,
    there is nothing to learn from: all are pooled.
    """
    common = prior(spreads)
    if common is None:
        return list(spreads)
    if math.isinf(common.degrees):
        pooled = sum(spread.degrees for spread in spreads)
        return [Spread(common.variance, pooled)] * len(spreads)
    return [
        Spread(
            (common.degrees * common.variance + own.degrees * own.variance)
            / (common.degrees + own.degrees),
            common.degrees + own.degrees,
        )
        for own in spreads
    ]


def prior(spreads: Sequence[Spread]) -> Spread | None:
    """The common variance and its degrees of freedom (infinite: the cells do not differ in their
    variances more than by chance); None where no cell has a variance."""
    known = [spread for spread in spreads if spread.degrees > 0 and spread.variance > 0]
    if not known:
        return None
    if len(known) < 3:
        degrees = sum(spread.degrees for spread in known)
        total = sum(spread.variance * spread.degrees for spread in known)
        return Spread(total / degrees, math.inf)
    from scipy.special import digamma, polygamma

    # Of the logarithm of a sample variance: its mean less that of log chi-square, formula 6.2.
    logs = [
        math.log(s.variance) - float(digamma(s.degrees / 2)) + math.log(s.degrees / 2)
        for s in known
    ]
    scatter = statistics.variance(logs) - statistics.fmean(
        float(polygamma(1, s.degrees / 2)) for s in known
    )
    mean = statistics.fmean(logs)
    if scatter <= 0:
        degrees = sum(spread.degrees for spread in known)
        pooled = sum(spread.variance * spread.degrees for spread in known) / degrees
        return Spread(pooled, math.inf)
    half = inverse_trigamma(scatter)
    return Spread(math.exp(mean + float(digamma(half)) - math.log(half)), 2 * half)


def inverse_trigamma(value: float) -> float:
    """The number whose trigamma is `value` (above 0), by Newton's method as in Smyth's appendix."""
    from scipy.special import polygamma

    if value > 1e7:
        return 1 / math.sqrt(value)
    if value < 1e-6:
        return 1 / value
    x = 0.5 + 1 / value
    for _ in range(50):
        trigamma = float(polygamma(1, x))
        step = trigamma * (1 - trigamma / value) / float(polygamma(2, x))
        x += step
        if -step / x < 1e-8:
            break
    return x
