"""Verdict on parity within the segment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from harness.spec.training import EXACT, REASONS, Tolerance

if TYPE_CHECKING:
    pass
from harness.parity.reference import Noise

# Deviation of each precision from the fp32 reference, over at most 20 steps; measured in
# docs/studies/parity-deviations.md.
PRECISION = {
    "bf16": Tolerance(
        2e-3, 0.12, "bf16 keeps 8 bits of mantissa: every product is rounded to 0.4 %"
    ),
    "fp16": Tolerance(
        1e-3, 0.05, "fp16 keeps 11 bits of mantissa, gradients are scaled by a power of two"
    ),
}


HALF_BATCH_NORM = Tolerance(
    2e-2,
    1.0,
    "BatchNorm divides by statistics of rounded activations, which amplifies the rounding",
)


SPLIT_BATCH_NORM = Tolerance(
    0.3, 3.0, "BatchNorm normalises each replica's or micro-batch's own samples: another training"
)


TIMES_NOISE = 10.0
"""Multiple of the reference's noise that a correct trial on a GPU may deviate by. The noise is from
one pair of runs, and a trial's kernels differ more than theirs."""
WIDEST_BY_NOISE = (1e-4, 5e-2)
"""Loss and update deviations up to which noise widens a limit. A loss scaled by 2, the smallest
gradient mistake in docs/explanation/parity.md, deviates by 1.4e-4 and 0.17."""


@dataclass(frozen=True)
class ParityVerdict:
    """One of `exact`, `within tolerance`, `diverged` and `unknown`, with deviations and
    tolerances."""

    verdict: str
    reason: str
    max_loss_deviation: float | None
    max_update_deviation: float | None
    worst_tensor: str | None
    loss_tolerance: float
    update_tolerance: float


def noise_of(
    losses: Sequence[float | None], updates: Mapping[str, float], reference: Sequence[float]
) -> Noise | None:
    """Returns the noise shown by a second reference run; None if it did not stay finite."""
    noise = Noise(max(loss_deviations(losses, reference)), max(updates.values(), default=math.inf))
    return noise if math.isfinite(noise.loss) and math.isfinite(noise.update) else None


def loss_deviations(losses: Sequence[float | None], reference: Sequence[float]) -> list[float]:
    """Returns |loss - reference| / |reference| at each step; infinite for a missing or non-finite
    loss."""
    gaps = []
    for step, expected in enumerate(reference):
        loss = losses[step] if step < len(losses) else None
        usable = loss is not None and math.isfinite(loss)
        gaps.append(
            abs(loss - expected) / max(abs(expected), 1e-12)
            if usable and loss is not None
            else math.inf
        )
    return gaps


def parity_verdict(
    losses: Sequence[float | None],
    reference_losses: Sequence[float],
    updates: Sequence[Mapping[str, float]],
    all_names: Sequence[str],
    allowed: Tolerance,
    tied: Mapping[str, str] | None = None,
    noise: Noise | None = None,
) -> ParityVerdict:
    """Returns the verdict. `updates`: each rank's deviations by tensor, together of all tensors.

    `noise`: the reference's; if it exceeds what is allowed, the reason says so.
    """
    gaps = loss_deviations(losses, reference_losses)
    worst_loss = max(gaps)
    merged = _largest_by_tensor(updates)
    missing = [
        name
        for name in all_names
        if name not in merged and not any(t in merged for t, o in (tied or {}).items() if o == name)
    ]
    worst_tensor = max(merged, key=lambda n: merged[n], default=None)
    worst_update = merged[worst_tensor] if worst_tensor is not None else math.inf

    def verdict(word: str, reason: str) -> ParityVerdict:
        finite = [x if math.isfinite(x) else None for x in (worst_loss, worst_update)]
        reason = REASONS.join(part for part in (reason, beyond(allowed, noise)) if part)
        return ParityVerdict(
            word, reason, finite[0], finite[1], worst_tensor, allowed.loss, allowed.update
        )

    if missing:
        return verdict(
            "diverged",
            f"{len(missing)} parameters were not shown to the harness, {missing[0]} for one",
        )
    if worst_loss > allowed.loss:
        step = next(i for i, gap in enumerate(gaps) if gap > allowed.loss)
        finding = (
            "is not finite"
            if not math.isfinite(gaps[step])
            else f"is off by {gaps[step]:.1e} (allowed {allowed.loss:.0e})"
        )
        return verdict(
            "diverged", f"loss {finding} at step {step}, largest deviation {worst_loss:.1e}"
        )
    if worst_update > allowed.update:
        return verdict(
            "diverged",
            f"parameters of {worst_tensor} are off by {worst_update:.1e} of their update (allowed"
            f" {allowed.update:.0e})",
        )
    if worst_loss <= EXACT.loss and worst_update <= EXACT.update:
        return verdict("exact", "")
    if allowed.reason == EXACT.reason and noise is not None:  # widened by the noise alone
        moved = f"{noise.loss:.1e} in the loss and {noise.update:.1e} in the parameters"
        return verdict("exact", f"rounding alone moves the reference by {moved}")
    return verdict("within tolerance", allowed.reason)


def _largest_by_tensor(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the largest deviation over the ranks; infinite if not finite."""
    merged: dict[str, float] = {}
    for of_rank in updates:
        for name, value in of_rank.items():
            merged[name] = max(merged.get(name, 0.0), value if math.isfinite(value) else math.inf)
    return merged


def beyond(allowed: Tolerance, noise: Noise | None) -> str:
    """Describes reference noise beyond the tolerance, or empty."""
    if noise is None or (noise.loss <= allowed.loss and noise.update <= allowed.update):
        return ""
    return (
        f"the reference itself moves by {noise.loss:.1e} in the loss and {noise.update:.1e} in the"
        f" parameters when its batch is split differently (allowed {allowed.loss:.0e} and"
        f" {allowed.update:.0e})"
    )


def widened(allowed: Tolerance, noise: Noise | None) -> Tolerance:
    """Returns the tolerance on a GPU: `allowed`, or TIMES_NOISE times the noise if that is more, at
    most WIDEST_BY_NOISE."""
    if noise is None:
        return allowed
    most_loss, most_update = WIDEST_BY_NOISE
    return Tolerance(
        max(allowed.loss, min(TIMES_NOISE * noise.loss, most_loss)),
        max(allowed.update, min(TIMES_NOISE * noise.update, most_update)),
        allowed.reason,
    )


def widest(*deviations: Tolerance, between: str = REASONS) -> Tolerance:
    """Returns the largest of each limit, with all reasons joined by `between`."""
    loose = [d for d in deviations if d != EXACT]
    if not loose:
        return EXACT
    return Tolerance(
        max(d.loss for d in loose),
        max(d.update for d in loose),
        between.join(dict.fromkeys(d.reason for d in loose)),
    )


def as_row(verdict: ParityVerdict) -> dict[str, Any]:
    return {f"parity_{name}": value for name, value in asdict(verdict).items()}
