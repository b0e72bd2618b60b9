"""Parity after the segment.

Correct trainings drift apart, because each step amplifies rounding. Losses must stay within an
envelope that widens at the rate of two reference runs that split the batch differently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from harness.parity.verdict import ParityVerdict, loss_deviations
from harness.spec.training import EXACT

NARROWEST = 2e-6
"""Relative deviation that rounding a loss can cause."""
UNKNOWN = 1e-5
"""Allowed relative deviation at the segment's end while the drift is unknown."""
TIMES_DRIFT = 30.0
"""Allowed multiple of the references' chaotic drift; see docs/studies/parity-deviations.md."""
TIMES_OWN = 3.0
"""Allowed multiple of the trial's deviation within the segment."""
WIDEST = 0.05
"""Declared tolerance of a different training, whose later losses are not checked. Also limits the
envelope without a second reference run."""
MOST = 0.5
"""Limit of the envelope: after a few percent of drift, correct trainings differ as any two do."""
GROWTH_PER_STEP = 0.08
"""Log growth of the envelope per step if a second reference run failed or rounded alike."""


def envelope(
    step: int, segment: int, tolerance: float, own: float, drift: Sequence[float]
) -> float:
    """Returns the allowed relative loss deviation at a step after the segment; infinite if the
    strategy declares `WIDEST` or more.

    `segment`: its length; `tolerance`: allowed within it; `own`: the trial's largest deviation
    there; `drift`: relative deviation of the second reference run by step, or empty. Declared
    tolerances (low precision, compression) grow like a sum of independent roundings, with the
    square root of the steps. If the reference's drift grew more since the segment, they grow by
    that.
    """
    if tolerance >= WIDEST:  # declared to be a different training
        return math.inf
    if drift:
        # A trial may drift some steps earlier.
        drifted = max(drift[: round(1.2 * step) + 8])
        rounding, most = TIMES_DRIFT * drifted, MOST if drifted else WIDEST
        grown = drifted / max(*drift[:segment], NARROWEST / TIMES_DRIFT)
    else:
        grown, most = math.exp(GROWTH_PER_STEP * (step - segment + 1)), WIDEST
        rounding = UNKNOWN * grown
    if tolerance > EXACT.loss:
        rounding = max(rounding, tolerance * max(grown, math.sqrt((step + 1) / max(1, segment))))
    return max(NARROWEST, min(most, max(TIMES_OWN * own, rounding)))


def with_jumps(drift: Sequence[float], segment: int) -> list[float]:
    """Returns a convolutional net's reference drift, raised in case a trial jumps earlier.

    ReLU and max pooling can turn rounding into a different gradient at once. One training jumped at
    step 19, its references not within 60 (docs/studies/parity-deviations.md). After the segment,
    the drift is at least the growth assumed without a second reference run.
    """
    least = UNKNOWN / TIMES_OWN
    later = enumerate(drift[segment:], 1)
    grown = [max(apart, least * math.exp(GROWTH_PER_STEP * steps)) for steps, apart in later]
    return [*drift[:segment], *grown]


def deviations_later(
    losses: Sequence[float | None], reference: Sequence[float], segment: int
) -> list[float]:
    """Returns |loss - reference| / |reference| by step after the segment."""
    known = min(len(losses), len(reference))
    return loss_deviations(losses[segment:known], reference[segment:known])


def with_later(
    verdict: ParityVerdict,
    later: Sequence[float],
    segment: int,
    drift: Sequence[float],
) -> ParityVerdict:
    """Returns the verdict, or `diverged` if a later loss leaves the envelope."""
    own = verdict.max_loss_deviation or 0.0
    for step, deviation in enumerate(later, segment):
        allowed = envelope(step, segment, verdict.loss_tolerance, own, drift)
        if not (deviation <= allowed and math.isfinite(deviation)):
            off = f"is off by {deviation:.1e}" if math.isfinite(deviation) else "is not finite"
            return replace(
                verdict,
                verdict="diverged",
                reason=(
                    f"the loss {off} at step {step}, after the parity segment (allowed"
                    f" {allowed:.0e})"
                ),
            )
    return verdict


def largest_finite(deviations: Sequence[float]) -> float | None:
    return max((value for value in deviations if math.isfinite(value)), default=None)
