"""Corrects predicted times by runs on a user's own GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

USUAL_FACTOR = 1.4
"""Factor within which unanchored speeds of fine-tunings are assumed to be accurate, as an 80%
interval."""
NOISE, NOISE_WEIGHT = 0.08, 4
"""Standard deviation of log times around a GPU's common error, and the number of runs that this
assumption is worth. The deviation is that of 36 published runs on A100
(docs/studies/fine-tuning-fits.md)."""
NORMAL = 1.2816
"""Bound of the 80% interval of a standard normal distribution."""
BIAS = math.sqrt((math.log(USUAL_FACTOR) / NORMAL) ** 2 - NOISE**2)
"""Standard deviation of a GPU's common error, which with NOISE gives the interval of
USUAL_FACTOR."""


@dataclass(frozen=True)
class Anchor:
    """Correction of predicted times."""

    runs: int
    source: str
    factor: float
    """Expected ratio of measured to predicted time."""
    half_width: float
    """Half-width of the 80% interval of a further run's log time."""

    @property
    def text(self) -> str:
        return (
            f"times are multiplied by {self.factor:.2f}, from {self.runs} runs in {self.source};"
            " memory is not anchored"
        )


def anchor_of(errors: Sequence[float], source: str) -> Anchor:
    """Returns the correction that follows from runs, given the log of each run's measured over
    predicted time.

    All runs share an error with prior N(0, BIAS^2), which few runs hardly move, and each run has
    noise of its own. The noise's variance, which is estimated first, has a scaled inverse
    chi-squared prior, so a further run follows Student's t distribution. Source: Gelman and others,
    Bayesian Data Analysis, 3rd edition, sections 2.5, 2.6 and 3.3.
    """
    from scipy.stats import t

    count, mean = len(errors), sum(errors) / len(errors)
    freedom = NOISE_WEIGHT + count - 1
    squares = sum((error - mean) ** 2 for error in errors)
    variance = (NOISE_WEIGHT * NOISE**2 + squares) / freedom
    precision = 1 / BIAS**2 + count / variance
    bound = float(t.ppf(0.9, freedom))
    return Anchor(
        count,
        source,
        math.exp(mean * count / variance / precision),
        bound * math.sqrt(variance + 1 / precision),
    )
