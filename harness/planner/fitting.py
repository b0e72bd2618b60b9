"""Fits constants to measurements: robustly, with priors, within physical bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from scipy.optimize import least_squares

from harness.planner.constants import bounds_of
from harness.planner.layouts import Floats, Ints

SCALE = 0.05
"""Logarithm of an ordinary error: rows that are much farther off hardly count (Cauchy loss)."""
PRIOR_WEIGHT = 0.7
"""A constant one standard deviation off its prior costs as much as a row off by this x SCALE."""
MOST_EVALUATIONS, MOST_WITH_EFFECTS = 60, 25
"""Of a fit. Further ones move hundreds of effects a little, and predict other cells no better."""
ENOUGH, ENOUGH_WITH_EFFECTS = 1e-4, 1e-6
"""Relative change of the loss at which a fit ends."""

Constants = TypeVar("Constants")
"""A frozen dataclass whose fields are declared with their bounds (see constants.py)."""


def fit(
    kind: type[Constants],
    predict: Callable[[Constants, Floats], Floats],
    measured: Floats,
    effects: Ints | None = None,
    effect_spread: float = 1.0,
) -> tuple[Constants, Floats]:
    """The constants that bring predictions closest to measurements, on logarithms.

    `predict` gives the predictions (shape of `measured`, in its unit) of constants and of effects:
    further unknowns that are believed to be 0 with the standard deviation `effect_spread`.
    `effects` (shape [measured, kinds]) numbers them from 0: those that a row depends on. Returns
    the constants and the effects.
    """
    bounds = bounds_of(kind)
    prior = np.array([b.prior for b in bounds.values()])
    spread = np.array([b.spread for b in bounds.values()])
    low = (np.array([b.low for b in bounds.values()]) - prior) / spread
    high = (np.array([b.high for b in bounds.values()]) - prior) / spread
    count = 0 if effects is None else int(effects.max()) + 1
    free = np.full(count, np.inf)
    make: Callable[..., Constants] = kind

    def constants(x: Floats) -> Constants:
        values = np.clip(prior + x * spread, prior + low * spread, prior + high * spread)
        return make(**dict(zip(bounds, values.tolist(), strict=True)))

    def residuals(x: Floats) -> Floats:
        own, others = x[: len(prior)], x[len(prior) :]
        errors = np.log(predict(constants(own), others * effect_spread) / measured)
        return np.concatenate([errors, PRIOR_WEIGHT * SCALE * x])

    solution = least_squares(
        residuals,
        np.zeros(len(prior) + count),
        bounds=(np.concatenate([low - 1e-6, -free]), np.concatenate([high + 1e-6, free])),
        loss="cauchy",
        f_scale=SCALE,
        max_nfev=MOST_EVALUATIONS if effects is None else MOST_WITH_EFFECTS,
        ftol=ENOUGH if effects is None else ENOUGH_WITH_EFFECTS,
        # With it all effects of a kind are varied at once: a row depends on one of each.
        jac_sparsity=None if effects is None else _dependencies(len(prior), effects),
    )
    return constants(solution.x[: len(prior)]), solution.x[len(prior) :] * effect_spread


def _dependencies(constants: int, effects: Ints) -> Ints:
    """Which residuals (rows) depend on which unknowns (columns): predictions on all constants and
    on their effects, beliefs on the unknown that they are of."""
    rows, count = len(effects), int(effects.max()) + 1
    beliefs = np.eye(constants + count, dtype=np.int64)
    predictions = np.zeros((rows, constants + count), np.int64)
    predictions[:, :constants] = 1
    for kind in effects.T:
        predictions[np.arange(rows), constants + kind] = 1
    return np.concatenate([predictions, beliefs])
