"""Verdict on parity within the segment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from harness.parity.reference import Noise
from harness.parity.reference_runs import reference_of
from harness.spec.cell import Cell
from harness.spec.training import EXACT, REASONS, Layout, Tolerance
from harness.strategy.base import Strategy
from harness.strategy.optimizers import TOLERANCES
from harness.strategy.registry import batches_normalised
from harness.workloads import Workload, make_workload
from harness.workloads.counts import model_facts

# Deviation from a reference in the same precision, over at most 20 steps; measured in
# docs/studies/parity-deviations.md.
PRECISION = {
    "bf16": Tolerance(
        3e-3, 0.02, "bf16 keeps 8 bits of mantissa: sums in another order round differently"
    ),
    "fp16": Tolerance(
        4e-4, 5e-3, "fp16 keeps 11 bits of mantissa: sums in another order round differently"
    ),
}


HALF_BATCH_NORM = Tolerance(
    2e-2,
    0.4,
    "BatchNorm divides by statistics of rounded activations, which amplifies the rounding",
)


SPLIT_BATCH_NORM = Tolerance(
    EXACT.loss,
    EXACT.update,
    "BatchNorm normalises each replica's or micro-batch's own samples, in the reference too",
)


TIMES_NOISE = 5.0
"""Multiple of the reference's noise that a correct trial may deviate by. The noise is from one pair
of runs, whose kernels differ less than a trial's."""
WIDEST_BY_NOISE = {"fp32": (1e-5, 5e-3), "bf16": (4e-3, 0.1), "fp16": (4e-3, 0.1)}
"""Loss and update deviations by precision up to which noise widens a limit. Training without weight
decay deviates by 2.4e-5 and 0.019, with a loss scaled by 2 by 1.4e-4 and 0.17."""


@dataclass(frozen=True)
class ParityVerdict:
    """`exact`, `within tolerance`, `diverged` or `unknown`, with deviations and tolerances."""

    verdict: str
    reason: str
    max_loss_deviation: float | None
    max_update_deviation: float | None
    worst_tensor: str | None
    loss_tolerance: float
    update_tolerance: float
    max_norm_deviation: float | None = None
    """Largest deviation of a gradient norm; None without clipping."""


def noise_of(
    losses: Sequence[float | None], updates: Mapping[str, float], reference: Sequence[float]
) -> Noise | None:
    """Returns the noise of a second reference run; None if it did not stay finite."""
    loss = max(loss_deviations(losses, reference))
    noise = Noise(loss, max(updates.values(), default=math.inf), dict(updates))
    return noise if math.isfinite(noise.loss) and math.isfinite(noise.update) else None


def loss_deviations(losses: Sequence[float | None], reference: Sequence[float]) -> list[float]:
    """Returns |loss - reference| / |reference| by step; infinite for missing or non-finite
    losses."""
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
    """Returns the verdict; its reason mentions `noise`, the reference's, if beyond what is allowed.

    `updates`: each rank's deviations by tensor, together of all tensors.
    """
    tied = tied or {}

    def limit(name: str) -> float:
        return max(allowed.update, allowed.tensors.get(tied.get(name, name), 0.0))

    gaps = loss_deviations(losses, reference_losses)
    merged: dict[str, float] = {}
    for of_rank in updates:
        for name, value in of_rank.items():
            merged[name] = max(merged.get(name, 0.0), value if math.isfinite(value) else math.inf)
    missing = [
        name
        for name in all_names
        if name not in merged and not any(t in merged for t, o in tied.items() if o == name)
    ]
    worst_tensor = max(merged, key=lambda n: merged[n] / limit(n), default=None)
    worst_update = merged[worst_tensor] if worst_tensor is not None else math.inf
    most_update = limit(worst_tensor or "")
    if missing:
        word = "diverged"
        reason = f"{len(missing)} parameters were not shown to the harness, {missing[0]} for one"
    elif max(gaps) > allowed.loss:
        word, reason = "diverged", _loss_reason(gaps, allowed.loss)
    elif worst_update > most_update:
        word = "diverged"
        reason = (
            f"parameters of {worst_tensor} are off by {worst_update:.1e} of their update (allowed"
            f" {most_update:.0e})"
        )
    elif max(gaps) <= EXACT.loss and all(v <= EXACT.update for v in merged.values()):
        word, reason = "exact", "" if allowed.reason == EXACT.reason else allowed.reason
    elif allowed.reason == EXACT.reason:  # widened by rounding alone
        word, reason = "exact", _rounding_reason(noise)
    else:
        word, reason = "within tolerance", allowed.reason
    return ParityVerdict(
        word,
        REASONS.join(part for part in (reason, beyond(allowed, noise)) if part),
        max(gaps) if math.isfinite(max(gaps)) else None,
        worst_update if math.isfinite(worst_update) else None,
        worst_tensor,
        allowed.loss,
        most_update,
    )


def _rounding_reason(noise: Noise | None) -> str:
    if noise is None:
        return ""
    moved = f"{noise.loss:.1e} in the loss and {noise.update:.1e} in the parameters"
    return f"rounding alone moves the reference by {moved}"


def _loss_reason(gaps: Sequence[float], allowed: float) -> str:
    step = next(i for i, gap in enumerate(gaps) if gap > allowed)
    finding = (
        f"is off by {gaps[step]:.1e} (allowed {allowed:.0e})"
        if math.isfinite(gaps[step])
        else "is not finite"
    )
    return f"loss {finding} at step {step}, largest deviation {max(gaps):.1e}"


def beyond(allowed: Tolerance, noise: Noise | None) -> str:
    """Describes reference noise beyond the tolerance, or empty."""
    if noise is None or (noise.loss <= allowed.loss and noise.update <= allowed.update):
        return ""
    return (
        f"the reference itself moves by {noise.loss:.1e} in the loss and {noise.update:.1e} in the"
        f" parameters when its batch is split differently (allowed {allowed.loss:.0e} and"
        f" {allowed.update:.0e})"
    )


def widened(
    allowed: Tolerance, roundings: Mapping[str, float], noise: Noise | None, precision: str
) -> Tolerance:
    """Returns `allowed`, wider by what fp32 cannot represent of a tensor (see
    `Reference.roundings`), or TIMES_NOISE times the noise if more, at most WIDEST_BY_NOISE."""
    most_loss, most_update = WIDEST_BY_NOISE[precision]
    noise = noise or Noise(0.0, 0.0)
    tensors = {name: allowed.update + unseen for name, unseen in roundings.items()}
    for name, moved in noise.tensors.items():
        by_noise = min(TIMES_NOISE * moved, most_update)
        tensors[name] = max(tensors.get(name, allowed.update), by_noise)
    loss = max(allowed.loss, min(TIMES_NOISE * noise.loss, most_loss))
    return replace(allowed, loss=loss, tensors=tensors)


PART_OF_NO_EXCHANGE = 3.0
"""Divisor of the deviation without any exchange, which gives the widest limit."""
CAPPED_ABOVE = 0.03
"""Update limit above which the deviation without any exchange is measured."""


def capped(allowed: Tolerance, no_exchange: Noise) -> Tolerance:
    """Returns `allowed`, kept below the deviation of training without any exchange."""
    return replace(
        allowed,
        loss=min(allowed.loss, no_exchange.loss / PART_OF_NO_EXCHANGE),
        update=min(allowed.update, no_exchange.update / PART_OF_NO_EXCHANGE),
        tensors={},
    )


def unverifiable(verdict: ParityVerdict, no_exchange: Noise) -> ParityVerdict:
    """Returns the verdict as `unknown`: the deviation is declared, but too close to that without
    any exchange."""
    return replace(
        verdict,
        verdict="unknown",
        reason=(
            f"cannot be verified: losses are off by {verdict.max_loss_deviation or 0.0:.1e} and"
            f" parameters by {verdict.max_update_deviation or 0.0:.1e}; without any exchange,"
            f" by {no_exchange.loss:.1e} and {no_exchange.update:.1e}"
        ),
    )


def widest(*deviations: Tolerance, between: str = REASONS) -> Tolerance:
    """Returns the largest of each limit, joining reasons by `between`."""
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


def in_fp32(cell: Cell) -> Cell | None:
    """Returns the cell with fp32 weights; None if it has them."""
    name = make_workload(cell.workload).in_fp32
    return cell.model_copy(update={"workload": name}) if name else None


def distance_to_fp32(cell: Cell, losses: Sequence[float | None]) -> float | None:
    """Returns the largest relative deviation from fp32 losses. None if weights are fp32 or a loss
    is not finite."""
    twin = in_fp32(cell)
    if twin is None or not (reference := reference_of(twin)).exists:
        return None
    farthest = max(loss_deviations(losses, reference.facts["losses"][: cell.parity_steps]))
    return farthest if math.isfinite(farthest) else None


def allowed_deviation(
    cell: Cell, workload: Workload, strategy: Strategy, layout: Layout
) -> Tolerance:
    """Returns the declared tolerance, widened for precision and split BatchNorm.

    Half precision and the model's response to its rounding are one reason: see `rounding_alone`.
    """
    shared = [workload.tolerance(cell) or EXACT]
    if cell.precision in PRECISION:
        shared += [PRECISION[cell.precision], *([HALF_BATCH_NORM] if workload.batch_norm else [])]
    reasons = [strategy.tolerance(cell, workload), widest(*shared, between=", and ")]
    if cell.optimizer in TOLERANCES:
        reasons.append(TOLERANCES[cell.optimizer])
    if workload.batch_norm and batches_normalised(strategy, cell, layout) > 1:
        reasons.append(SPLIT_BATCH_NORM)
    return widest(*reasons)


def verdict_of(
    cell: Cell,
    workload: Workload,
    allowed: Tolerance,
    losses: Sequence[float | None],
    updates: Sequence[Mapping[str, float]],
    reference_losses: Sequence[float],
    why_not: str,
    noise: Noise | None = None,
) -> ParityVerdict:
    """Returns the verdict on `losses` by step and each rank's `updates`; without a reference,
    unknown because of `why_not`."""
    if not reference_losses:
        return ParityVerdict("unknown", why_not, None, None, None, allowed.loss, allowed.update)
    return parity_verdict(
        losses,
        reference_losses,
        updates,
        model_facts(workload, cell.sequence_length).trainable,
        allowed,
        workload.split.tied if workload.split else None,
        noise,
    )
