from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from harness.parity.later import WIDEST
from harness.parity.verdict import ParityVerdict

LARGEST_DEVIATION = 1e-5
"""Limit for |norm - reference| / |reference| in fp32."""

LEAST_NORM = 1e-12
"""Smallest norm that deviations are divided by."""

TIMES_LOSS = 10.0
"""Limit as a multiple of the loss tolerance, if that is wider."""


def norm_deviations(
    norms: Sequence[float | None], training_steps: Sequence[int], expected: Sequence[float]
) -> dict[int, float]:
    """Returns the largest relative deviation of each training step in the segment; infinite for
    unknown norms.

    `norms`, `training_steps`: by step taken. `expected`: by training step.
    """
    deviations: dict[int, float] = {}
    for step, norm in zip(training_steps, norms, strict=True):
        if step < len(expected):
            gap = math.inf
            if norm is not None and math.isfinite(norm):
                gap = abs(norm - expected[step]) / max(expected[step], LEAST_NORM)
            deviations[step] = max(gap, deviations.get(step, 0.0))
    return deviations


def allowed_norm(loss_tolerance: float, update_tolerance: float) -> float:
    """Returns the allowed deviation of a norm; infinite from `WIDEST`.

    Norms are more sensitive to rounding than losses.
    """
    if loss_tolerance >= WIDEST:
        return math.inf
    return max(LARGEST_DEVIATION, min(update_tolerance, TIMES_LOSS * loss_tolerance))


def with_norms(verdict: ParityVerdict, deviations: dict[int, float]) -> ParityVerdict:
    """Adds the largest norm deviation to a verdict: `diverged` above `allowed_norm`."""
    if not deviations:
        return verdict
    largest = max(deviations.values())
    allowed = allowed_norm(verdict.loss_tolerance, verdict.update_tolerance)
    verdict = replace(verdict, max_norm_deviation=largest if math.isfinite(largest) else None)
    off = [step for step, gap in sorted(deviations.items()) if gap > allowed]
    if not off or verdict.verdict == "unknown":
        return verdict
    gap = deviations[off[0]]
    finding = f"is off by {gap:.1e} (allowed {allowed:.0e})" if math.isfinite(gap) else "is unknown"
    reason = f"the gradient norm {finding} at step {off[0]}, largest deviation {largest:.1e}"
    return replace(verdict, verdict="diverged", reason=reason)
