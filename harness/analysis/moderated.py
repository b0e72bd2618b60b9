"""Spreads of cells with few launches each, moderated over all cells of a run.

A cell of two launches knows nearly nothing of its own spread. Variances of cells are taken to
scatter about a common one as a scaled inverse chi-square with so many degrees of freedom (Smyth,
Linear models and empirical Bayes methods, Statistical Applications in Genetics and Molecular
Biology 3 (2004), section 3), which depends on how much a launch of a cell averages: as the power of
a covariate (Law, Chen, Shi and Smyth, voom, Genome Biology 15 (2014), R29, with a straight line in
the place of their curve). All are estimated from the run by maximum likelihood: ratios of variances
follow Fisher's F distribution.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FEWEST_FOR_PRIOR = 3
"""Cells with a spread of their own; of fewer all are pooled."""
FEWEST_FOR_TREND = 12
"""Of fewer the common variance is the same for all."""
LEAST_DEGREES, MOST_DEGREES = 1.0, 1000.0
"""Bounds of the estimated degrees of freedom of the common variance."""
STEEPEST = 2.0
"""Bound of the power."""


@dataclass(frozen=True)
class Spread:
    """A variance, and with how many degrees of freedom it is known."""

    variance: float
    degrees: float
    averaged: float = 1.0
    """What a launch is the mean of: its timed steps."""


@dataclass(frozen=True)
class Prior:
    """The common variance of a run's cells."""

    variance: float
    """Where `averaged` is 1."""
    degrees: float
    """Infinite: cells do not differ in their variances beyond it."""
    power: float = 0.0
    """Of `averaged`, by which the variance grows: -1 where steps are independent."""

    def of(self, spread: Spread) -> float:
        """The common variance of cells that average so much."""
        return float(self.variance * spread.averaged**self.power)


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
        return [Spread(common.of(own), pooled, own.averaged) for own in spreads]
    return [
        Spread(
            (common.degrees * common.of(own) + own.degrees * own.variance)
            / (common.degrees + own.degrees),
            common.degrees + own.degrees,
            own.averaged,
        )
        for own in spreads
    ]


def prior(spreads: Sequence[Spread]) -> Prior | None:
    """The common variance; None where no cell has a variance."""
    known = [spread for spread in spreads if spread.degrees > 0 and spread.variance > 0]
    if not known:
        return None
    if len(known) < FEWEST_FOR_PRIOR:
        degrees = sum(spread.degrees for spread in known)
        total = sum(spread.variance * spread.degrees for spread in known)
        return Prior(total / degrees, math.inf)
    return _most_likely(known)


def _most_likely(known: Sequence[Spread]) -> Prior:
    import numpy as np
    from scipy.optimize import minimize
    from scipy.special import betaln

    variances = np.array([spread.variance for spread in known])
    own = np.array([spread.degrees for spread in known])
    logs = np.log([spread.averaged for spread in known])
    middle = float(np.mean(logs))
    with_trend = len(known) >= FEWEST_FOR_TREND and float(np.ptp(logs)) > math.log(2)

    def unlikely(parameters: NDArray[np.float64]) -> float:
        """Less the logarithm of the likelihood, but for what does not depend on the parameters."""
        level, log_degrees, power = (*map(float, parameters), 0.0)[:3]
        if not math.log(LEAST_DEGREES) <= log_degrees <= math.log(MOST_DEGREES):
            return math.inf
        if abs(power) > STEEPEST:
            return math.inf
        degrees = math.exp(log_degrees)
        common = np.exp(level + power * (logs - middle))
        share = own / degrees * variances / common
        each = (
            own / 2 * np.log(share)
            - (own + degrees) / 2 * np.log1p(share)
            - betaln(own / 2, degrees / 2)
        )
        return -float(each.sum())

    level = math.log(statistics.median(variances) + 1e-300)
    start = [level, math.log(5.0), *([-0.5] if with_trend else [])]
    optimum = minimize(
        unlikely, start, method="Nelder-Mead", options={"xatol": 1e-3, "fatol": 1e-3}
    )
    level, log_degrees, power = (*map(float, optimum.x), 0.0)[:3]
    degrees = math.exp(log_degrees)
    return Prior(
        math.exp(level - power * middle),
        math.inf if degrees > MOST_DEGREES / 2 else degrees,
        power,
    )
