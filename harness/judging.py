"""What a cell is compared with: its reference run, the fp32 one beside it, and how far it may be
from them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.cell import Cell
from harness.outcome import Outcome
from harness.parity import (
    HALF_BATCH_NORM,
    PRECISION,
    SPLIT_BATCH_NORM,
    Noise,
    Verdict,
    judge,
    loss_deviations,
    widest,
)
from harness.record import mean_losses
from harness.references import reference_of
from harness.registry import batch_norm_is_split
from harness.strategy import EXACT, Deviation, Layout, Strategy
from harness.workloads import Workload, make_workload
from harness.workloads.facts import model_facts


def in_fp32(cell: Cell) -> Cell | None:
    """The cell with the same workload's weights in fp32; None where they are."""
    name = make_workload(cell.workload).in_fp32
    return cell.model_copy(update={"workload": name}) if name else None


def distance_to_fp32(cell: Cell, outcome: Outcome) -> float | None:
    """Largest relative deviation of the losses from the fp32 reference's; None where weights are
    fp32 or a loss is not finite."""
    twin = in_fp32(cell)
    if outcome.status != "ok" or twin is None or not (reference := reference_of(twin)).exists:
        return None
    farthest = max(
        loss_deviations(
            mean_losses(outcome.answers), reference.facts["losses"][: cell.parity_steps]
        )
    )
    return farthest if math.isfinite(farthest) else None


def allowed_deviation(
    cell: Cell, workload: Workload, strategy: Strategy, layout: Layout
) -> Deviation:
    """What the strategy and the workload declare, and what the precision and a split BatchNorm
    add."""
    reasons = [strategy.deviation(cell, workload), workload.deviation(cell) or EXACT]
    if cell.precision in PRECISION:
        reasons += [PRECISION[cell.precision], *([HALF_BATCH_NORM] if workload.batch_norm else [])]
    if batch_norm_is_split(strategy, cell, workload, layout):
        reasons.append(SPLIT_BATCH_NORM)
    return widest(*reasons)


def verdict_of(
    cell: Cell,
    workload: Workload,
    allowed: Deviation,
    outcome: Outcome,
    reference_losses: Sequence[float],
    why_not: str,
    noise: Noise | None = None,
) -> Verdict:
    if not reference_losses:
        return Verdict("unknown", why_not, None, None, None, allowed.loss, allowed.update)
    return judge(
        mean_losses(outcome.answers),
        reference_losses,
        [a["update_deviations"] for a in outcome.answers],
        model_facts(workload, cell.sequence_length).trainable,
        allowed,
        workload.split.tied if workload.split else None,
        noise,
    )
