"""Parity of the gradient norms before clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from harness.parity.later import WIDEST
from harness.parity.verdict import ParityVerdict

LARGEST_DEVIATION = 1e-5
"""Largest |norm - reference| / |reference| of the same training in fp32."""

TIMES_LOSS = 10.0
"""Multiple of a wider loss tolerance that norms may deviate by."""


def norm_deviations(
    norms: Sequence[float | None], training_steps: Sequence[int], expected: Sequence[float]
) -> dict[int, float]:
    """Returns the relative deviation by training step of the segment, the largest if retrained.

    `norms`, `training_steps`: of each step taken; `expected`: the reference's by training step.
    Infinite for unknown norms; empty without clipping.
    """
    deviations: dict[int, float] = {}
    for step, norm in zip(training_steps, norms, strict=True):
        if step < len(expected):
            usable = norm is not None and math.isfinite(norm)
            gap = abs(norm - expected[step]) / expected[step] if usable and norm else math.inf
            deviations[step] = max(gap, deviations.get(step, 0.0))
    return deviations


def allowed_norm(loss_tolerance: float, update_tolerance: float) -> float:
    """Returns the largest deviation of a norm; infinite for a training declared to be another (see
    `WIDEST`).

    Norms react more strongly to rounding than losses: in bf16 they are off by up to 4e-3, losses by
    2e-4.
    """
    if loss_tolerance >= WIDEST:
        return math.inf
    return max(LARGEST_DEVIATION, min(update_tolerance, TIMES_LOSS * loss_tolerance))


def with_norms(verdict: ParityVerdict, deviations: dict[int, float]) -> ParityVerdict:
    """Returns the verdict with the largest deviation, `diverged` if a norm is off.

    A strategy that declares a wider tolerance for losses may deviate further: see `allowed_norm`.
    """
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
