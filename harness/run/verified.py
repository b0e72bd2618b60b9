"""Compares a trial with its reference run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness.analysis.cell_result import VERIFIED
from harness.analysis.losses import Pass, mean_losses, passes
from harness.launch.outcome import Outcome
from harness.parity.judging import allowed_deviation, distance_to_fp32, verdict_of
from harness.parity.later import deviations_later, with_jumps, with_later
from harness.parity.reference import Noise, Reference
from harness.parity.reference_runs import noise_for
from harness.parity.verdict import ParityVerdict, widened
from harness.run.prepared import PreparedTrial
from harness.run.rows import SetBackCheck, Verification
from harness.spec.training import Tolerance


def verified(prepared: PreparedTrial, outcome: Outcome, why_not: str = "") -> Verification:
    """Returns the verdict on a trial; without a reference it is unknown, because of `why_not`.

    While the reference's drift is unknown, later losses are held to the narrowest envelope: a trial
    within it is within every other.
    """
    cell, reference = prepared.cell, prepared.known
    noise = noise_for(cell, reference) if reference else None
    reference_losses = reference.facts["losses"][: cell.parity_steps] if reference else []
    if outcome.status != "ok":
        return Verification(None, reference_losses, noise, None)
    losses = mean_losses([[step.loss for step in rank.steps] for rank in outcome.trained])
    steps = [step.training_step for step in outcome.trained[0].steps]
    first, *replays = passes(losses, steps)
    judging = _Judging(
        prepared,
        widened(
            allowed_deviation(cell, prepared.workload, prepared.strategy, prepared.layout), noise
        ),
        reference_losses,
        why_not,
        reference,
        noise,
    )
    verdict = judging.of(first.losses, [rank.update_deviations or {} for rank in outcome.trained])
    distance = distance_to_fp32(cell, first.losses) if losses else None
    if not reference or verdict.verdict not in VERIFIED:
        return Verification(verdict, reference_losses, noise, distance)
    later = judging.later(first)
    verdict = judging.with_later(verdict, later)
    checks: list[ParityVerdict] = []
    for number, replay in enumerate(replays):
        again = judging.of(
            first.before(replay.first) + replay.losses,
            [rank.replayed_deviations[number] for rank in outcome.trained],
        )
        checks.append(again)
        if again.verdict not in VERIFIED and verdict.verdict in VERIFIED:
            where = "after the parity segment, when its state was set back to step"
            reason = f"{where} {replay.first}: {again.reason}"
            verdict = replace(again, reason=reason)
        further = judging.later(replay)
        later += further
        verdict = judging.with_later(verdict, further)
    check = SetBackCheck.of(checks, prepared.not_set_back)
    return Verification(verdict, reference_losses, noise, distance, tuple(later), check)


@dataclass(frozen=True)
class _Judging:
    prepared: PreparedTrial
    allowed: Tolerance
    reference_losses: Sequence[float]
    why_not: str
    reference: Reference | None
    noise: Noise | None

    def of(
        self, losses: Sequence[float | None], updates: Sequence[Mapping[str, float]]
    ) -> ParityVerdict:
        """Returns the verdict on the parity segment, or on a retrained part of it."""
        return verdict_of(
            self.prepared.cell,
            self.prepared.workload,
            self.allowed,
            losses,
            updates,
            self.reference_losses,
            self.why_not,
            self.noise,
        )

    def later(self, steps: Pass) -> list[float]:
        """Returns the loss deviations after the segment."""
        assert self.reference is not None
        segment = self.prepared.cell.parity_steps
        losses = [None] * segment + list(steps.since(segment))
        return deviations_later(losses, self.reference.all_losses, segment)

    def with_later(self, verdict: ParityVerdict, later: Sequence[float]) -> ParityVerdict:
        """Returns the verdict, or `diverged` if a later deviation leaves the envelope."""
        assert self.reference is not None
        if verdict.verdict not in VERIFIED:
            return verdict
        segment, drift = self.prepared.cell.parity_steps, self.reference.drift
        if drift is None:
            drift = [0.0] * len(self.reference.all_losses)
        if self.prepared.workload.batch_norm:
            drift = with_jumps(drift, segment)
        low = self.reference.precision_drift(self.prepared.cell.precision)
        return with_later(verdict, later, segment, drift, low)
