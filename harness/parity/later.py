"""Is a trial still the same training after the parity segment?

Two correct trainings drift apart, because rounding is amplified from step to step. How fast, two
reference runs show that differ only in how they split the batch; losses of a trial stay within an
envelope that widens as theirs do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from harness.parity.verdict import ParityVerdict, loss_deviations
from harness.spec.training import EXACT

NARROWEST = 2e-6
"""Relative deviation that rounding of a loss alone may bring about."""
TIMES_DRIFT = 30.0
"""How many times the drift of the two reference runs a correct trial may drift: it is chaotic.
docs/studies/parity-deviations.md has what trials need."""
TIMES_OWN = 3.0
"""How many times its own deviation within the segment."""
WIDEST = 0.05
"""Of a strategy that declares so much or more, later losses are not looked at: it is another
training. Without a second reference run the envelope widens no further than this either."""
MOST = 0.5
"""The envelope widens no further: two correct trainings that have drifted apart by some percent
soon differ as any two do, and the loss alone says little."""
GROWTH_PER_STEP = 0.08
"""Logarithm of the factor by which it widens with each step where there is no second reference
run (it did not end well, or rounded alike)."""


def envelope(
    step: int, segment: int, tolerance: float, own: float, drift: Sequence[float]
) -> float:
    """Largest relative deviation of the loss that is allowed at a step after the segment; infinite
    where the strategy declares more than `WIDEST`.

    `segment`: its length; `tolerance`: what is allowed within it; `own`: the trial's largest there.
    `drift`: relative deviation of the second reference run at each step, empty where there is none.
    What is declared (low precision, compression) grows with the square root of the steps, as the
    sum of independent roundings does, or as the reference's own drift grew since the segment, if
    that is more.
    """
    if tolerance >= WIDEST:  # declared to be another training
        return math.inf
    if drift:
        # A trial may be some steps ahead of it.
        drifted = max(drift[: round(1.2 * step) + 8])
        rounding, most = TIMES_DRIFT * drifted, MOST if drifted else WIDEST
        grown = drifted / max(*drift[:segment], NARROWEST / TIMES_DRIFT)
    else:
        grown, most = math.exp(GROWTH_PER_STEP * (step - segment + 1)), WIDEST
        rounding = EXACT.loss * grown
    if tolerance > EXACT.loss:
        rounding = max(rounding, tolerance * max(grown, math.sqrt((step + 1) / max(1, segment))))
    return max(NARROWEST, min(most, max(TIMES_OWN * own, rounding)))


def with_jumps(drift: Sequence[float], segment: int) -> list[float]:
    """The drift of a convolutional net's references, as far as a trial may be ahead of it.

    ReLU and max pooling turn a rounding into another gradient at once: it happened at step 19 to
    one training and to its references not within 60 (docs/studies/parity-deviations.md). After the
    segment a drift that grows as it does without a second reference run is taken where it is more.
    """
    least = EXACT.loss / TIMES_OWN
    later = enumerate(drift[segment:], 1)
    grown = [max(apart, least * math.exp(GROWTH_PER_STEP * steps)) for steps, apart in later]
    return [*drift[:segment], *grown]


def deviations_later(
    losses: Sequence[float | None], reference: Sequence[float], segment: int
) -> list[float]:
    """|loss - reference| / |reference| of each step after the segment that the reference knows."""
    known = min(len(losses), len(reference))
    return loss_deviations(losses[segment:known], reference[segment:known])


def with_later(
    verdict: ParityVerdict,
    later: Sequence[float],
    segment: int,
    drift: Sequence[float],
    precision_drift: Sequence[float] = (),
) -> ParityVerdict:
    """The verdict, or `diverged` where a later step's loss leaves the envelope; see there.

    `precision_drift`: relative deviation of the reference in the trial's precision at each step,
    where it is known. A batch may be sensitive to it: the envelope is as wide at its step.
    """
    own = verdict.max_loss_deviation or 0.0
    for step, deviation in enumerate(later, segment):
        allowed = envelope(step, segment, verdict.loss_tolerance, own, drift)
        if step < len(precision_drift) and math.isfinite(precision_drift[step]):
            allowed = max(allowed, min(MOST, TIMES_OWN * precision_drift[step]))
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
    """The largest of those that are finite; None without one."""
    return max((value for value in deviations if math.isfinite(value)), default=None)
