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
    predict: Callable[[Constants], Floats],
    measured: Floats,
    start: Constants | None = None,
) -> Constants:
    """Returns the constants that bring log predictions closest to measurements.

    `predict` returns the shape and unit of `measured`.
    """
    priors = priors_of(kind)
    columns = ((p.value, p.spread, p.low, p.high) for p in priors.values())
    prior, spread, least, most = np.array(list(columns)).T
    low, high = (least - prior) / spread, (most - prior) / spread
    make: Callable[..., Constants] = kind

    def constants(x: Floats) -> Constants:
        values = np.clip(prior + x * spread, prior + low * spread, prior + high * spread)
        return make(**dict(zip(priors, values.tolist(), strict=True)))

    def residuals(x: Floats) -> Floats:
        errors = np.log(predict(constants(x)) / measured)
        return np.concatenate([errors, PRIOR_WEIGHT * SCALE * x])

    first = np.zeros(len(prior))
    if start is not None:
        first = (np.array([getattr(start, name) for name in priors]) - prior) / spread
    solution = least_squares(
        residuals,
        first,
        bounds=(low - 1e-6, high + 1e-6),
        loss="cauchy",
        f_scale=SCALE,
        max_nfev=MOST_EVALUATIONS,
        ftol=ENOUGH,
    )
    return constants(solution.x)
