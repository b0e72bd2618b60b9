"""Parity after the segment.

Each step amplifies rounding, so correct runs drift apart. Losses must stay within an envelope that
widens like the drift between two reference runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from harness.analysis.consistency import loss_deviations
from harness.cell.training import EXACT
from harness.parity.reference import Noise
from harness.parity.verdict import TIMES_NOISE, ParityVerdict

NARROWEST = 2e-6
"""Relative deviation that rounding can cause in a loss."""
UNKNOWN = 1e-5
"""Allowed relative deviation at the segment's end if the drift is unknown."""
TIMES_DRIFT = 30.0
"""Allowed multiple of the reference's drift; see docs/studies/parity-deviations.md."""
TIMES_OWN = 3.0
"""Allowed multiple of the deviation that the trial itself has within the segment."""
WIDEST = 0.05
"""Declared loss tolerance from which later losses are not checked. It also caps the envelope if
there is no second reference run."""
MOST = 0.5
"""Maximum value of the envelope."""
GROWTH_PER_STEP = 0.08
"""Log growth of the envelope per step without a usable second reference run."""


def envelope(
    step: int, segment: int, tolerance: float, deviation: float, drift: Sequence[float]
) -> float:
    """Returns the allowed relative loss deviation at a step after the segment; infinite from
    `WIDEST`. Declared tolerances grow with the root of the steps, like independent roundings, or
    with the drift if that grew more. `deviation`: the trial's largest deviation within the segment.
    `drift`: deviation of the second reference run, by step; empty without one."""
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
    return max(NARROWEST, min(most, max(TIMES_OWN * deviation, rounding)))


def with_jumps(drift: Sequence[float], segment: int) -> list[float]:
    """Raises a convolutional net's reference drift: in ReLU and max pooling, rounding can change a
    gradient abruptly (docs/studies/parity-deviations.md).
    """
    least = UNKNOWN / TIMES_OWN
    later = enumerate(drift[segment:], 1)
    grown = [max(apart, least * math.exp(GROWTH_PER_STEP * steps)) for steps, apart in later]
    return [*drift[:segment], *grown]


def deviations_later(
    losses: Sequence[float | None], reference: Sequence[float], segment: int
) -> list[float]:
    """Returns |loss - reference| / |reference| by step after the segment."""
    count = min(len(losses), len(reference))
    return loss_deviations(losses[segment:count], reference[segment:count])


def with_later(
    verdict: ParityVerdict,
    later: Sequence[float],
    segment: int,
    drift: Sequence[float],
) -> ParityVerdict:
    """Returns the verdict, or `diverged` if a later loss leaves the envelope."""
    parity_deviation = verdict.max_loss_deviation or 0.0
    for step, deviation in enumerate(later, segment):
        allowed = envelope(step, segment, verdict.loss_tolerance, parity_deviation, drift)
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


LARGEST_DEVIATION = 1e-5
"""Maximum |norm - reference| / |reference| in fp32."""

LEAST_NORM = 1e-12
"""Minimum norm that deviations are divided by."""

TIMES_LOSS = 10.0
"""Limit as a multiple of the loss tolerance, if that limit is wider."""

LEAST_SHARE = 0.25
"""Share of that limit down to which the reference's noise narrows it."""


def norm_deviations(
    ranks: Sequence[Sequence[float | None]],
    training_steps: Sequence[int],
    expected: Sequence[float],
) -> dict[int, float]:
    """Returns the largest relative deviation of any rank at each training step in the segment;
    infinite for unknown norms.

    `ranks`: norms of each rank by step taken; ranks that know none are left out if others do.
    `training_steps`: by step taken. `expected`: by training step.
    """
    deviations: dict[int, float] = {}
    knowing = [norms for norms in ranks if set(norms) != {None}] or ranks
    for norms in knowing:
        for step, norm in zip(training_steps, norms, strict=True):
            if step < len(expected):
                gap = math.inf
                if norm is not None and math.isfinite(norm):
                    gap = abs(norm - expected[step]) / max(expected[step], LEAST_NORM)
                deviations[step] = max(gap, deviations.get(step, 0.0))
    return deviations


def allowed_norm(loss_tolerance: float, update_tolerance: float, noise: float = 0.0) -> float:
    """Returns the allowed deviation of a norm; infinite from `WIDEST`. `noise`: deviation of the
    reference's norms, 0 if unknown.

    Norms are more sensitive to rounding than losses.
    """
    if loss_tolerance >= WIDEST:
        return math.inf
    widest = max(LARGEST_DEVIATION, min(update_tolerance, TIMES_LOSS * loss_tolerance))
    return min(widest, max(LEAST_SHARE * widest, TIMES_NOISE * noise)) if noise else widest


def with_norms(
    verdict: ParityVerdict, deviations: dict[int, float], noise: Noise | None = None
) -> ParityVerdict:
    """Adds the largest norm deviation to a verdict: `diverged` above `allowed_norm`."""
    if not deviations:
        return verdict
    largest = max(deviations.values())
    moved = noise.norm if noise else 0.0
    allowed = allowed_norm(verdict.loss_tolerance, verdict.update_tolerance, moved)
    verdict = replace(verdict, max_norm_deviation=largest if math.isfinite(largest) else None)
    off = [step for step, gap in sorted(deviations.items()) if gap > allowed]
    if not off or verdict.verdict == "unknown":
        return verdict
    gap = deviations[off[0]]
    finding = f"is off by {gap:.1e} (allowed {allowed:.0e})" if math.isfinite(gap) else "is unknown"
    reason = f"the gradient norm {finding} at step {off[0]}, largest deviation {largest:.1e}"
    return replace(verdict, verdict="diverged", reason=reason)
