"""Spreads of cells with few trials, moderated over all cells of a run.

Cells' variances are assumed to scatter about a common one as a scaled inverse chi-square (Smyth,
Linear models and empirical Bayes methods, Statistical Applications in Genetics and Molecular
Biology 3 (2004), section 3). The common variance depends on a power of the number of steps a trial
averages (Law, Chen, Shi and Smyth, voom, Genome Biology 15 (2014), R29, with a straight line
instead of their curve). All are estimated by maximum likelihood: ratios of variances follow
Fisher's F distribution.
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
"""Fewest cells with a spread for a prior; fewer are pooled."""
FEWEST_FOR_TREND = 12
"""Fewest cells for a trend of the variance."""
LEAST_DEGREES, MOST_DEGREES = 1.0, 1000.0
"""Bounds on the common variance's degrees of freedom."""
STEEPEST = 2.0
"""Bound on the absolute power."""


@dataclass(frozen=True)
class Spread:
    """A variance with its degrees of freedom."""

    variance: float
    degrees: float
    averaged: float = 1.0
    """Number of timed steps that a trial averages."""


@dataclass(frozen=True)
class Prior:
    """The common variance of a run's cells."""

    variance: float
    """Variance at `averaged` 1."""
    degrees: float
    """Degrees of freedom; infinite if variances of cells do not differ."""
    power: float = 0.0
    """Power of `averaged` in the variance: -1 if steps are independent."""

    def of(self, spread: Spread) -> float:
        """Returns the common variance of cells with this `averaged`."""
        return float(self.variance * spread.averaged**self.power)


def moderated(spreads: Sequence[Spread]) -> list[Spread]:
    """Returns variances shrunk towards the common one, in the cells' order.

    Cells without a degree of freedom get the common one. If fewer than three cells have any, all
    are pooled.
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
    """Returns the common variance; None if no cell has a variance."""
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
        """Returns the negative log-likelihood, up to a constant."""
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
