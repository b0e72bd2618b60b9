"""How a trial compares with its reference run."""

from __future__ import annotations

from harness.analysis.cell_result import VERIFIED
from harness.analysis.losses import mean_losses
from harness.launch.outcome import Outcome
from harness.parity.judging import allowed_deviation, distance_to_fp32, verdict_of
from harness.parity.later import deviations_later, with_jumps, with_later
from harness.run.prepared import PreparedTrial
from harness.run.rows import Verification


def verified(prepared: PreparedTrial, outcome: Outcome, why_not: str) -> Verification:
    """The verdict on a trial; without a reference it is unknown, for the reason `why_not`."""
    cell, reference = prepared.cell, prepared.known
    noise = reference.noise if reference else None
    reference_losses = reference.facts["losses"][: cell.parity_steps] if reference else []
    if outcome.status != "ok":
        return Verification(None, reference_losses, noise, None)
    losses = mean_losses([[step.loss for step in rank.steps] for rank in outcome.trained])
    verdict = verdict_of(
        cell,
        prepared.workload,
        allowed_deviation(cell, prepared.workload, prepared.strategy, prepared.layout),
        losses,
        [rank.update_deviations or {} for rank in outcome.trained],
        reference_losses,
        why_not,
        noise,
    )
    later = []
    if reference and verdict.verdict in VERIFIED:
        later = deviations_later(losses, reference.all_losses, cell.parity_steps)
        drift = reference.drift
        if prepared.workload.batch_norm:
            drift = with_jumps(drift, cell.parity_steps)
        verdict = with_later(verdict, later, cell.parity_steps, drift)
    distance = distance_to_fp32(cell, losses) if losses else None
    return Verification(verdict, reference_losses, noise, distance, tuple(later))
