from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from harness.analysis.cell_result import NOT_CHECKED, VERIFIED
from harness.analysis.consistency import Pass, loss_deviations, mean_losses, passes
from harness.cell.cell import Cell
from harness.cell.training import CAPPED_ABOVE, Tolerance, half_precision
from harness.host.cores import allowed_cores
from harness.host.environment import gpus
from harness.launch.launcher import LauncherProtocol, TrialOptions
from harness.launch.outcome import Outcome
from harness.parity.comparison import with_replicas, with_sketch
from harness.parity.later import (
    WIDEST,
    deviations_later,
    norm_deviations,
    with_jumps,
    with_later,
    with_norms,
)
from harness.parity.reference import Deviations, Noise, Reference, all_ranks
from harness.parity.reference_runs import (
    is_noisy,
    make_room,
    noise_for,
    reference_cell,
    reference_key,
    reference_of,
    rounded_differently,
    wholly_in_fp32,
    without_exchange,
)
from harness.parity.verdict import (
    Limits,
    ParityVerdict,
    allowed_deviation,
    beyond,
    capped,
    compared,
    distance_to_fp32,
    no_more_than_noise,
    noise_of,
    unverifiable,
    verdict_of,
)
from harness.record.store import TrialKey
from harness.run.expected import time_limit_seconds
from harness.run.long_training import long_cell, steps_to_sketch
from harness.run.metrics import Verification
from harness.run.prepared import PreparedTrial
from harness.seam.base import Emulation
from harness.seam.registry import make_strategy
from harness.workloads import DataSource, make_workload, prepare_data
from harness.workloads.counts import model_facts

if TYPE_CHECKING:
    from typing_extensions import Unpack

SPARE_STEPS = 1.25
"""Factor on a reference's steps, because trials may take more than planned."""
FLOPS_FOR_THREADS = 1e9
"""FLOPs per step above which a longer reference run uses all cores."""


@dataclass
class ReferenceRuns:
    """Caches reference runs on disk, and launches those that are missing."""

    failures: dict[str, str] = field(default_factory=dict)
    long: dict[tuple[str, str], Verification] = field(default_factory=dict)
    """Results of long trainings by strategy and cell id; see harness/run/long_training.py."""
    announce: Callable[[str], None] = field(default=lambda what: None)

    def of(
        self,
        launcher: LauncherProtocol,
        cells: Sequence[Cell],
        announce: Callable[[str], None],
    ) -> dict[str, Reference]:
        """Returns every cell's reference by `reference_key`. `announce`: called for each launch.
        Raises KeyboardInterrupt if the user interrupts a launch."""
        references: dict[str, Reference] = {}
        all_cells, self.announce = compared(cells), announce
        make_room(all_cells)
        for cell in all_cells:
            key = reference_key(cell)
            if key not in references:
                references[key] = reference_of(cell)
                references[key].remove_if_damaged()
                if not references[key].exists:
                    self._train(launcher, cell, references[key], announce)
                if references[key].exists:
                    self._learn_noise(launcher, cell, references[key], announce)
            if references[key].exists:
                self._learn_no_exchange(launcher, cell, references[key], announce)
        return references

    def _train(
        self,
        launcher: LauncherProtocol,
        cell: Cell,
        reference: Reference,
        announce: Callable[[str], None],
    ) -> None:
        announce(f"reference run of {cell.workload}, batch {cell.global_batch}, {cell.optimizer}")
        training = reference_cell(cell)
        # A GPU takes no spare steps: the reference alone trains a batch meant for all GPUs.
        spare = SPARE_STEPS if cell.device == "cpu" else 1.0
        longer = _with_steps(training, math.ceil(spare * training.total_steps))
        outcome = _launch(launcher, longer, _data_of(cell), reference_output=reference.folder)
        if outcome.status != "ok":
            reason = f"the reference run ended {outcome.status}: {outcome.reason}"
            self.failures[reference.folder] = reason
        elif losses := _losses_of(outcome):
            reference.note_losses(losses)

    def _learn_noise(
        self,
        launcher: LauncherProtocol,
        cell: Cell,
        reference: Reference,
        announce: Callable[[str], None],
    ) -> None:
        """Trains the reference again with other rounding, if its losses and parameters depend on
        rounding and the noise is not measured yet."""
        training = reference_cell(cell)
        if reference.noise is not None or not is_noisy(training):
            return
        announce("second reference run, with samples split or reordered, to measure rounding")
        again, data = rounded_differently(training, _data_of(cell))
        outcome = _launch(launcher, again, data, reference=reference.folder)
        if outcome.status != "ok" or not (deviations := outcome.trained[0].deviations):
            return
        losses = mean_losses([[step.loss for step in outcome.trained[0].steps]])
        if make_workload(cell.workload).batch_norm and training.micro_batches > 1:
            # Running statistics follow the order of the parts, which a training must keep.
            deviations = replace(deviations, buffers={})
        norms = [step.gradient_norm for step in outcome.trained[0].steps]
        moved = norm_deviations([norms], range(len(norms)), reference.gradient_norms).values()
        if noise := noise_of(losses, deviations, reference.facts["losses"], moved):
            reference.note(noise)

    def _learn_no_exchange(
        self,
        launcher: LauncherProtocol,
        cell: Cell,
        reference: Reference,
        announce: Callable[[str], None],
    ) -> None:
        """Measures how far ranks that exchange nothing deviate, if the cell's limit is wide."""
        alone, ranks = without_exchange(cell)
        if ranks == 1 or declared(cell).update <= CAPPED_ABOVE or reference.no_exchange(ranks):
            return
        announce(
            f"reference run on {ranks} ranks that exchange nothing, to bound the cell's limits"
        )
        outcome = _launch(launcher, alone, _data_of(cell), ranks, reference=reference.folder)
        if outcome.status == "ok":
            losses = mean_losses([[step.loss for step in rank.steps] for rank in outcome.trained])
            found = all_ranks(rank.deviations or Deviations() for rank in outcome.trained)
            if deviations := noise_of(losses, found, reference.facts["losses"]):
                reference.note_no_exchange(ranks, deviations)

    def verify(
        self,
        launcher: LauncherProtocol,
        prepared: PreparedTrial,
        outcome: Outcome,
        seed: int | None = None,
    ) -> Verification:
        """Returns a trial's verdict, after extending the reference to all its steps. With a seed,
        which nobody can predict, the first verified trial of a strategy is followed by a long
        training, as is each variant that may be the fastest."""
        verification = self._compared(launcher, prepared, outcome)
        verdict, strategy = verification.verdict, prepared.cell.strategy
        if seed is None or not verdict or verdict.verdict not in VERIFIED:
            return verification
        wide = declared(prepared.cell).update > CAPPED_ABOVE
        if (nano := None if wide else long_cell(prepared.cell)) is None:
            return verification
        if (strategy, nano.id) not in self.long:
            if prepared.is_planned and any(strategy == trained for trained, _ in self.long):
                return verification
            self.long[strategy, nano.id] = self._train_long(launcher, nano, seed)
        long = self.long[strategy, nano.id]
        if long.verdict and long.verdict.verdict == "diverged":
            where = f"in a training of {nano.total_steps} steps of {nano.workload}"
            reason = f"{where}: {long.verdict.reason}"
            verdict = replace(verdict, verdict="diverged", reason=reason)
            return replace(verification, verdict=verdict, verified_steps=None, long=long)
        steps = max(verification.verified_steps or 0, long.verified_steps or 0)
        return replace(verification, verified_steps=steps, long=long)

    def _train_long(self, launcher: LauncherProtocol, nano: Cell, seed: int) -> Verification:
        self.announce(f"{nano.total_steps} steps of {nano.name}, to verify late steps")
        reference = self.of(launcher, [nano], self.announce)[reference_key(nano)]
        prepared = PreparedTrial(nano, TrialKey(nano.id, 0), -1, reference)
        prepared.sketch(steps_to_sketch(f"{seed} {nano.id}"))
        outcome = prepared.run(launcher, lambda step, seconds: None)
        if outcome.status == "interrupted":
            raise KeyboardInterrupt
        if outcome.status != "ok":
            self.announce(f"{nano.name} ended {outcome.status}: {outcome.reason}")
        return self._compared(launcher, prepared, outcome)

    def _compared(
        self, launcher: LauncherProtocol, prepared: PreparedTrial, outcome: Outcome
    ) -> Verification:
        cell, reference = prepared.cell, prepared.reference
        if why_not := prepared.strategy.capabilities.unverified:
            verification = verified(prepared, outcome, why_not)
            verdict = verification.verdict and replace(verification.verdict, verdict=NOT_CHECKED)
            return replace(verification, verdict=verdict)
        if reference is None:
            return verified(prepared, outcome, "a probe is not compared with a reference run")
        if prepared.existing_reference and not reference.exists:
            prepared.existing_reference = None
            self.failures[reference.folder] = "the reference was removed or damaged meanwhile"
        if prepared.existing_reference is None or outcome.status != "ok":
            return verified(prepared, outcome, self.failures.get(reference.folder, ""))
        self._learn_losses(launcher, prepared, reference, outcome)
        verification = verified(prepared, outcome)
        verdict = verification.verdict
        diverged_later = verdict and verdict.verdict == "diverged" and verification.later_deviations
        if reference.drift is None and diverged_later:
            self._learn_drift(launcher, cell, reference)
            verification = verified(prepared, outcome)
        return verification

    def _learn_losses(
        self,
        launcher: LauncherProtocol,
        prepared: PreparedTrial,
        reference: Reference,
        outcome: Outcome,
    ) -> None:
        """Relaunches the reference with more steps if the trial took more, or with sketches if it
        has any; keeps the old losses if that fails."""
        taken = outcome.trained[0].steps
        steps = 1 + max(s.step if s.training_step is None else s.training_step for s in taken)
        sketched = max(prepared.sketched_after, default=0)
        if len(reference.all_losses) >= steps and len(reference.sketches) >= sketched:
            return
        # Another cell may take even more steps.
        longer = _with_steps(reference_cell(prepared.cell), math.ceil(SPARE_STEPS * steps))
        after = tuple(range(1, longer.total_steps + 1)) if sketched else ()
        data = _data_of(prepared.cell)
        outcome = _launch(launcher, _on_all_cores(longer), data, sketched_after=after)
        if losses := _losses_of(outcome):
            reference.note_losses(losses, outcome.trained[0].sketched)

    def _learn_drift(self, launcher: LauncherProtocol, cell: Cell, reference: Reference) -> None:
        losses = reference.all_losses
        longer = _on_all_cores(_with_steps(reference_cell(cell), len(losses)))
        again = _losses_of(_launch(launcher, *rounded_differently(longer, _data_of(cell))))
        drift = loss_deviations(again, losses) if len(again) == len(losses) else []
        # If both runs rounded alike, the drift tells you nothing about other runs.
        reference.note_drift(drift if any(drift) else [])


def declared(cell: Cell) -> Tolerance:
    """Returns a cell's limits before noise widens them."""
    strategy, workload = make_strategy(cell), make_workload(cell.workload)
    return allowed_deviation(cell, workload, strategy, strategy.layout(cell.devices))


def limits_of(cell: Cell, reference: Reference | None, noise: Noise | None) -> Limits:
    """Returns a cell's limits. Noise of one process tells nothing about a strategy that trains
    something else by design."""
    strategy, workload = make_strategy(cell), make_workload(cell.workload)
    by_design = strategy.tolerance(cell, workload).update > CAPPED_ABOVE
    rounds_to = half_precision(cell.precision, cell.workload)
    if not rounds_to:
        rounds_to = "fp32" if wholly_in_fp32(cell, workload) else "bf16"
    roundings = reference.roundings if reference else {}
    return Limits(declared(cell), rounds_to, roundings, None if by_design else noise)


def _data_of(cell: Cell) -> DataSource:
    return prepare_data(cell.data, make_workload(cell.workload), cell.sequence_length)


def _with_steps(reference: Cell, steps: int) -> Cell:
    return reference.model_copy(update={"timed_steps": steps - reference.warmup_steps})


def _on_all_cores(reference: Cell) -> Cell:
    """Returns the cell on all cores, unless its steps are too short to gain from threads. On a busy
    machine, threads wait long for each other."""
    facts = model_facts(make_workload(reference.workload), reference.sequence_length)
    short = facts.flops_per_sample * reference.global_batch < FLOPS_FOR_THREADS
    if reference.device != "cpu" or short:
        return reference
    return reference.model_copy(update={"threads_per_device": len(allowed_cores())})


def _losses_of(outcome: Outcome) -> list[float]:
    if outcome.status != "ok":
        return []
    losses = mean_losses([[step.loss for step in outcome.trained[0].steps]])
    return [loss for loss in losses if loss is not None]


def _launch(
    launcher: LauncherProtocol,
    cell: Cell,
    data: DataSource,
    processes: int = 1,
    **more: Unpack[TrialOptions],
) -> Outcome:
    if cell.device == "cuda":
        limit = time_limit_seconds(cell, next((name for name, _ in gpus()), None))
        cell = cell.model_copy(update={"time_limit_seconds": max(limit, cell.time_limit_seconds)})
    outcome = launcher.run(cell, data, processes, **more)
    if outcome.status == "interrupted":
        raise KeyboardInterrupt
    return outcome


def _ranks_agree(cell: Cell, step: int) -> bool:
    """Returns whether ranks should have equal parameters after a step."""
    reference = make_strategy(reference_cell(cell))
    return not isinstance(reference, Emulation) or reference.ranks_agree(step)


def verified(prepared: PreparedTrial, outcome: Outcome, why_not: str = "") -> Verification:
    """Returns a trial's verdict. Without a reference it is `unknown`, with the reason `why_not`.
    Until the reference's drift is measured, later losses must stay in the narrowest envelope."""
    cell, reference = prepared.cell, prepared.existing_reference
    noise = noise_for(cell, reference) if reference else None
    reference_losses = reference.facts["losses"][: cell.parity_steps] if reference else []
    if outcome.status != "ok":
        return Verification(None, reference_losses, noise, None)
    losses = mean_losses([[step.loss for step in rank.steps] for rank in outcome.trained])
    steps = [step.training_step for step in outcome.trained[0].steps]
    first, *replays = passes(losses, steps)
    limits = limits_of(cell, reference, noise)
    wide = limits.allowed.update > CAPPED_ABOVE
    no_exchange = reference.no_exchange(without_exchange(cell)[1]) if reference and wide else None
    judging = _Judging(prepared, limits, no_exchange, reference_losses, why_not, reference)
    verdict = judging.of(
        first.losses, [rank.deviations or Deviations() for rank in outcome.trained]
    )
    if reference:
        norms = _norms(prepared, reference, outcome)
        taken = _without_ahead(steps, outcome.trained[0].replays_ahead, cell.parity_steps)
        deviations = norm_deviations(norms, taken, reference.gradient_norms)
        verdict = with_norms(verdict, deviations, limits.noise)
    distance = distance_to_fp32(cell, first.losses) if losses else None
    if not reference or verdict.verdict not in VERIFIED:
        return Verification(verdict, reference_losses, noise, distance)
    later = judging.later(first)
    verdict = judging.with_later(verdict, later)
    checks: list[ParityVerdict] = []
    for number, replay in enumerate(replays):
        ahead = outcome.trained[0].replays_ahead[number]
        against = judging.ahead(replay.first) if ahead else judging
        again = against.of(
            first.before(replay.first) + replay.losses,
            [rank.replayed_deviations[number] for rank in outcome.trained],
        )
        checks.append(again)
        if again.verdict not in VERIFIED and verdict.verdict in VERIFIED:
            where = "after the parity segment, when its state was rewound to step"
            further = ", its optimizer ahead" if ahead else ""
            reason = f"{where} {replay.first}{further}: {again.reason}"
            verdict = replace(verdict, verdict=again.verdict, reason=reason)
        if not ahead:
            since = judging.later(replay)
            later += since
            verdict = judging.with_later(verdict, since)
    last = len(steps) - 1 if steps[-1] is None else steps[-1]
    if _ranks_agree(cell, last):
        verdict = judging.with_ranks(verdict, [rank.sketches or {} for rank in outcome.trained])
    verdict = judging.with_sketches(verdict, outcome)
    steps_verified, after = judging.verified_steps(verdict, steps), prepared.sketched_after
    judged = (verdict, reference_losses, noise, distance, tuple(later), checks)
    return Verification(*judged, steps_verified, after)


def _norms(
    prepared: PreparedTrial, reference: Reference, outcome: Outcome
) -> list[list[float | None]]:
    """Returns each rank's norms by step taken. An emulation records those of the first rank, and
    the others clip by norms of their own."""
    emulated = reference.facts.get("replicas", 1)
    return [
        [step.gradient_norm for step in rank.trained.steps]
        for rank in outcome.answers
        if rank.trained and prepared.layout.share(rank.rank) % emulated == 0
    ]


def _without_ahead(
    steps: Sequence[int | None], replays_ahead: Sequence[bool], segment: int
) -> list[int]:
    """Returns each step's training step, moved past the segment in replays ahead, whose norms are
    not compared."""
    taken: list[int] = []
    replays = -1
    for number, step in enumerate(steps):
        training_step = number if step is None else step
        rewound = bool(taken) and training_step != (steps[number - 1] or number - 1) + 1
        replays += rewound
        ahead = replays >= 0 and replays_ahead[replays]
        taken.append(training_step + segment if ahead else training_step)
    return taken


@dataclass(frozen=True)
class _Judging:
    prepared: PreparedTrial
    limits: Limits
    no_exchange: Noise | None
    reference_losses: Sequence[float]
    why_not: str
    reference: Reference | None

    def of(self, losses: Sequence[float | None], updates: Sequence[Deviations]) -> ParityVerdict:
        """Returns the verdict on the parity segment or its retrained part."""
        verdict, noise = self._with(self.limits, losses, updates), self.limits.noise
        wide = self.limits.allowed.update > CAPPED_ABOVE and self.prepared.cell.devices > 1
        if verdict.verdict == "diverged" and noise and beyond(self.limits):
            noisy = replace(self.limits, capped=False)
            if self._with(noisy, losses, updates).verdict in VERIFIED:
                return no_more_than_noise(verdict, noise)
        if verdict.verdict not in VERIFIED or not wide:
            return verdict
        if self.no_exchange is None:
            return unverifiable(verdict, None)
        tight = self._with(capped(self.limits, self.no_exchange), losses, updates)
        return tight if tight.verdict in VERIFIED else unverifiable(verdict, self.no_exchange)

    def ahead(self, step: int) -> _Judging:
        """Returns a judge for a replay ahead that begins at this step."""
        assert self.reference is not None
        losses = [*self.reference_losses[:step], *self.reference.ahead_losses]
        return replace(self, reference_losses=losses)

    def _with(
        self,
        limits: Limits,
        losses: Sequence[float | None],
        updates: Sequence[Deviations],
    ) -> ParityVerdict:
        return verdict_of(
            self.prepared.workload, limits, losses, updates, self.reference_losses, self.why_not
        )

    def later(self, steps: Pass) -> list[float]:
        assert self.reference is not None
        segment = self.prepared.cell.parity_steps
        losses = [None] * segment + list(steps.since(segment))
        return deviations_later(losses, self.reference.all_losses, segment)

    def with_ranks(
        self, verdict: ParityVerdict, ranks: Sequence[Mapping[str, float]]
    ) -> ParityVerdict:
        assert self.reference is not None
        cell, workload = self.prepared.cell, self.prepared.workload
        may_differ = make_strategy(cell).tolerance(cell, workload).update > CAPPED_ABOVE
        norms = self.reference.facts["update_norms"]
        return with_replicas(verdict, ranks, norms, self.limits, may_differ)

    def with_sketches(self, verdict: ParityVerdict, outcome: Outcome) -> ParityVerdict:
        """Compares parameters after late steps; `unknown` if the reference has none of these."""
        assert self.reference is not None
        replicas, norms = self.reference.sketches, self.reference.facts["update_norms"]
        if len(replicas) < max(self.prepared.sketched_after, default=0):
            return replace(verdict, verdict="unknown", reason=self.why_not)
        for number, steps in enumerate(self.prepared.sketched_after):
            expected = replicas[steps - 1]
            pairs = [
                (expected[self.prepared.layout.share(rank.rank) % len(expected)], sketch)
                for rank in outcome.answers
                for sketch in (rank.trained.sketched[number] if rank.trained else ())
            ]
            verdict = with_sketch(verdict, pairs, norms, steps)
        return verdict

    def verified_steps(self, verdict: ParityVerdict, taken: Sequence[int | None]) -> int | None:
        """Returns how many of the steps taken were compared; None if parity does not hold."""
        assert self.reference is not None
        checked = verdict.loss_tolerance < WIDEST
        losses = self.reference.all_losses if checked else self.reference_losses
        steps = min(len(losses), 1 + max(step or 0 for step in taken))
        return steps if verdict.verdict in VERIFIED else None

    def with_later(self, verdict: ParityVerdict, later: Sequence[float]) -> ParityVerdict:
        assert self.reference is not None
        if verdict.verdict not in VERIFIED:
            return verdict
        segment, drift = self.prepared.cell.parity_steps, self.reference.drift
        if drift is None:
            drift = [0.0] * len(self.reference.all_losses)
        if self.prepared.workload.batch_norm:
            drift = with_jumps(drift, segment)
        return with_later(verdict, later, segment, drift)
