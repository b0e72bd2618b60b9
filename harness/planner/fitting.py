"""Fits constants to measurements robustly, with priors and bounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

LEVEL = 0.8
"""Coverage of the 80 % intervals."""
SCALE = 0.05
"""Typical log error; much larger ones hardly count (Cauchy loss)."""
PRIOR_WEIGHT = 0.7
"""Error of a row, in units of SCALE, as costly as one standard deviation from a prior."""
MOST_EVALUATIONS = 60
ENOUGH = 1e-4
"""Relative change of the loss that ends a fit."""
STEP = 1e-5
"""Finite-difference step, in standard deviations of the prior."""

Constants = TypeVar("Constants")
"""Frozen dataclass whose fields are declared by `constant`."""


@dataclass(frozen=True)
class Prior:
    """Expected value without data, and physical bounds."""

    value: float
    spread: float
    low: float
    high: float
    unit: str


def constant(prior: Prior, meaning: str, source: str) -> float:
    """Declares a fitted field; `source` is where prior and bounds come from."""
    metadata = {"prior": prior, "meaning": meaning, "source": source}
    value: float = field(default=prior.value, metadata=metadata)
    return value


def priors_of(kind: type) -> dict[str, Prior]:
    return {f.name: f.metadata["prior"] for f in dataclasses.fields(kind)}


def fit(
    kind: type[Constants],
    predict: Callable[[Constants, Floats], Floats],
    measured: Floats,
    effects: Ints | None = None,
    effect_spread: float | Floats = 1.0,
    scale: float = SCALE,
    start: Constants | None = None,
) -> tuple[Constants, Floats]:
    """Returns constants and effects that bring log predictions closest to measurements.

    `predict` returns the shape and unit of `measured`. Effects are unknowns shared by rows, with
    prior 0 and standard deviation `effect_spread`, common or one each. `effects` (shape [measured,
    kinds]) numbers each row's from 0.
    """
    priors = priors_of(kind)
    columns = ((p.value, p.spread, p.low, p.high) for p in priors.values())
    prior, spread, least, most = np.array(list(columns)).T
    low, high = (least - prior) / spread, (most - prior) / spread
    count = 0 if effects is None else int(effects.max()) + 1
    free = np.full(count, np.inf)
    make: Callable[..., Constants] = kind

    def constants(x: Floats) -> Constants:
        values = np.clip(prior + x * spread, prior + low * spread, prior + high * spread)
        return make(**dict(zip(priors, values.tolist(), strict=True)))

    def residuals(x: Floats) -> Floats:
        figures = predict(constants(x[: len(prior)]), x[len(prior) :] * effect_spread)
        errors = np.log(figures / measured)
        return np.concatenate([errors, PRIOR_WEIGHT * scale * x])

    def slopes(x: Floats) -> Floats:
        """Returns slopes of residuals (rows) by unknowns (columns).

        A row has only one effect of a kind.
        """
        assert effects is not None
        start, rows = residuals(x)[: len(measured)], np.arange(len(measured))
        result = np.zeros((len(measured) + len(x), len(x)))
        result[len(measured) :] = PRIOR_WEIGHT * scale * np.eye(len(x))
        varied = [np.full(len(measured), number) for number in range(len(prior))]
        for unknowns in (*varied, *(len(prior) + kind for kind in effects.T)):
            step = np.zeros(len(x))
            step[unknowns] = STEP
            change = (residuals(x + step)[: len(measured)] - start) / STEP
            result[rows, unknowns] = change
        return result

    lowest = np.concatenate([low - 1e-6, -free])
    highest = np.concatenate([high + 1e-6, free])
    first = np.zeros(len(prior) + count)
    if start is not None:
        values = np.array([getattr(start, name) for name in priors])
        first[: len(prior)] = (values - prior) / spread
    if effects is not None:
        solution = _descend(residuals, slopes, first, lowest, highest, scale)
    else:
        solution = _descend_numerically(residuals, first, (lowest, highest), scale)
    return constants(solution[: len(prior)]), solution[len(prior) :] * effect_spread


def _descend_numerically(
    residuals: Callable[[Floats], Floats],
    start: Floats,
    bounds: tuple[Floats, Floats],
    scale: float,
) -> Floats:
    solution: Floats = least_squares(
        residuals,
        start,
        bounds=bounds,
        loss="cauchy",
        f_scale=scale,
        max_nfev=MOST_EVALUATIONS,
        ftol=ENOUGH,
    ).x
    return solution


def _descend(
    residuals: Callable[[Floats], Floats],
    slopes: Callable[[Floats], Floats],
    x: Floats,
    lowest: Floats,
    highest: Floats,
    scale: float,
) -> Floats:
    """Minimises the Cauchy loss within bounds by Levenberg-Marquardt steps on reweighted residuals
    (Holland and Welsch, 1977)."""

    def loss(errors: Floats) -> float:
        return float(np.log1p((errors / scale) ** 2).sum())

    errors, damping = residuals(x), 1e-2
    for _ in range(MOST_EVALUATIONS):
        slope = slopes(x)
        weighted = slope.T / (1 + (errors / scale) ** 2)
        towards, curvature = weighted @ errors, weighted @ slope
        before = loss(errors)
        while damping < 1e6:
            damped = curvature + damping * np.diag(np.diag(curvature) + scale**2 * 1e-3)
            tried = np.clip(x - np.linalg.solve(damped, towards), lowest, highest)
            of_tried = residuals(tried)
            if loss(of_tried) < before:
                x, errors, damping = tried, of_tried, damping / 5
                break
            damping *= 4
        if before - loss(errors) < ENOUGH * before:
            break
    return x
