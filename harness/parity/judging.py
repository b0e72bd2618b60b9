"""Comparison of a cell with its references."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from harness.parity.reference import Noise
from harness.parity.reference_runs import reference_of
from harness.parity.verdict import (
    HALF_BATCH_NORM,
    PRECISION,
    SPLIT_BATCH_NORM,
    ParityVerdict,
    loss_deviations,
    parity_verdict,
    widest,
)
from harness.spec.cell import Cell
from harness.spec.training import EXACT, Layout, Tolerance
from harness.strategy.base import Strategy
from harness.strategy.optimizers import TOLERANCES
from harness.strategy.registry import batch_norm_is_split
from harness.workloads import Workload, make_workload
from harness.workloads.counts import model_facts


def in_fp32(cell: Cell) -> Cell | None:
    """Returns the cell with weights in fp32; None if they already are."""
    name = make_workload(cell.workload).in_fp32
    return cell.model_copy(update={"workload": name}) if name else None


def distance_to_fp32(cell: Cell, losses: Sequence[float | None]) -> float | None:
    """Returns the largest relative deviation from fp32 losses; None if weights are fp32 or a loss
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
    if batch_norm_is_split(strategy, cell, workload, layout):
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
    """Returns the verdict on `losses` by step and each rank's `updates` (see
    harness/parity/verdict.py); without a reference, unknown because of `why_not`."""
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
