"""Reference runs that a run's trials are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.analysis.losses import mean_losses
from harness.host.cores import allowed_cores
from harness.host.environment import gpus
from harness.launch.launcher import LauncherProtocol
from harness.launch.options import TrialOptions
from harness.launch.outcome import Outcome
from harness.parity.judging import in_fp32
from harness.parity.reference import Reference
from harness.parity.reference_runs import (
    make_room,
    reference_cell,
    reference_key,
    reference_of,
    rounded_differently,
    split_differently,
)
from harness.parity.verdict import PRECISION, loss_deviations, noise_of
from harness.run.expected import time_limit_seconds
from harness.run.prepared import PreparedTrial
from harness.run.rows import Verification
from harness.run.verified import verified
from harness.spec.cell import Cell
from harness.workloads import DataSource, make_workload, prepare_data

if TYPE_CHECKING:
    from typing_extensions import Unpack


SPARE_STEPS = 1.25
"""Factor on the steps of a reference run: trials go on after the parity segment."""


@dataclass
class ReferenceRuns:
    """Caches reference runs on disk, and launches missing ones."""

    failures: dict[str, str] = field(default_factory=dict)
    """Reasons for failures, by reference folder."""

    def of(
        self,
        launcher: LauncherProtocol,
        cells: Sequence[Cell],
        announce: Callable[[str], None],
    ) -> dict[str, Reference]:
        """Returns the reference of every cell, by its key (see `reference_key`).

        `announce`: called for each launch. Raises KeyboardInterrupt if the user stops one.
        """
        references: dict[str, Reference] = {}
        all_cells = compared(cells)
        make_room(all_cells)
        for cell in all_cells:
            key = reference_key(cell)
            if key not in references:
                references[key] = reference_of(cell)
                self._complete(launcher, cell, references[key], announce)
        return references

    def _complete(
        self,
        launcher: LauncherProtocol,
        cell: Cell,
        reference: Reference,
        announce: Callable[[str], None],
    ) -> None:
        """Launches what a reference lacks: the run itself, or the one that measures its noise."""
        data = _data_of(cell)
        if not reference.exists:
            announce(
                f"reference run of {cell.workload}, batch {cell.global_batch}, {cell.optimizer}"
            )
            own = reference_cell(cell)
            if cell.device == "cpu":  # On a GPU, a batch meant for eight takes long enough.
                own = _with_steps(own, math.ceil(SPARE_STEPS * own.total_steps))
            outcome = _launch(launcher, own, data, reference_output=reference.folder)
            if outcome.status != "ok":
                self.failures[reference.folder] = (
                    f"the reference run ended {outcome.status}: {outcome.reason}"
                )
            elif known := _losses_of(outcome):
                reference.note_losses(known)
        again = split_differently(reference_cell(cell))
        if again and reference.exists and reference.noise is None:
            announce(
                f"the same with its batch in {again.micro_batches} parts: how far rounding alone"
                " leads"
            )
            outcome = _launch(launcher, again, data, reference=reference.folder)
            if outcome.status == "ok" and (rank := outcome.trained[0]).update_deviations:
                losses = mean_losses([[step.loss for step in rank.steps]])
                noise = noise_of(losses, rank.update_deviations, reference.facts["losses"])
                if noise:
                    reference.note(noise)

    def verify(
        self, launcher: LauncherProtocol, prepared: PreparedTrial, outcome: Outcome
    ) -> Verification:
        """Returns the verdict on a trial, with a reference that covers all its steps. If losses
        exceed the assumed effect of low precision, also runs references in it."""
        cell, reference = prepared.cell, prepared.reference
        if reference is None:
            return verified(prepared, outcome, "a probe is not compared with a reference run")
        if prepared.known is None or outcome.status != "ok":
            return verified(prepared, outcome, self.failures.get(reference.folder, ""))
        self._learn_losses(launcher, cell, reference, outcome)
        verification = verified(prepared, outcome)
        if reference.drift is None and _diverged_later(verification):
            self._learn_drift(launcher, cell, reference)
            verification = verified(prepared, outcome)
        if cell.precision in PRECISION and _diverged_later(verification):
            self._learn_drift_in_precision(launcher, cell, reference)
            verification = verified(prepared, outcome)
        return verification

    def _learn_losses(
        self, launcher: LauncherProtocol, cell: Cell, reference: Reference, outcome: Outcome
    ) -> None:
        """Launches the reference again if it has fewer losses than the trial has training steps.
        Keeps it unchanged if that fails."""
        taken = outcome.trained[0].steps
        steps = 1 + max(s.step if s.training_step is None else s.training_step for s in taken)
        if len(reference.all_losses) >= steps:
            return
        # Another cell may take more of them.
        longer = _on_all_cores(_with_steps(reference_cell(cell), math.ceil(SPARE_STEPS * steps)))
        if losses := _losses_of(_launch(launcher, longer, _data_of(cell))):
            reference.note_losses(losses)

    def _learn_drift(self, launcher: LauncherProtocol, cell: Cell, reference: Reference) -> None:
        """Adds the reference's drift: at each step, the loss deviation of the same training rounded
        differently."""
        known = reference.all_losses
        longer = _on_all_cores(_with_steps(reference_cell(cell), len(known)))
        again = _losses_of(_launch(launcher, *rounded_differently(longer, _data_of(cell))))
        drift = loss_deviations(again, known) if len(again) == len(known) else []
        # An empty drift means that both runs rounded alike, which tells you nothing about others.
        reference.note_drift(drift if any(drift) else [])

    def _learn_drift_in_precision(
        self, launcher: LauncherProtocol, cell: Cell, reference: Reference
    ) -> None:
        """Adds the drift in the cell's precision: at each step, the larger loss deviation of two
        runs that differ in rounding."""
        known = reference.all_losses
        if len(reference.precision_drift(cell.precision)) >= len(known):
            return
        longer = _on_all_cores(_with_steps(reference_cell(cell), len(known)))
        longer = longer.model_copy(update={"precision": cell.precision})
        data = _data_of(cell)
        runs = [
            _losses_of(_launch(launcher, *one))
            for one in ((longer, data), rounded_differently(longer, data))
        ]
        deviations = [loss_deviations(own, known) for own in runs if len(own) == len(known)]
        if deviations:
            largest = [max(at) for at in zip(*deviations, strict=True)]
            reference.note_precision_drift(cell.precision, largest)


def _diverged_later(verification: Verification) -> bool:
    """Returns whether a step after the parity segment made the trial `diverged`."""
    verdict = verification.verdict
    return bool(verdict and verdict.verdict == "diverged" and verification.later_deviations)


def _data_of(cell: Cell) -> DataSource:
    return prepare_data(cell.data, make_workload(cell.workload), cell.sequence_length)


def _with_steps(reference: Cell, steps: int) -> Cell:
    return reference.model_copy(update={"timed_steps": steps - reference.warmup_steps})


def _on_all_cores(reference: Cell) -> Cell:
    """Returns the reference cell on all cores: nobody compares its time."""
    cores = {"threads_per_device": len(allowed_cores())} if reference.device == "cpu" else {}
    return reference.model_copy(update=cores)


def _losses_of(outcome: Outcome) -> list[float]:
    """Returns a run's losses; empty if it failed."""
    if outcome.status != "ok":
        return []
    losses = mean_losses([[step.loss for step in outcome.trained[0].steps]])
    return [loss for loss in losses if loss is not None]


def _launch(
    launcher: LauncherProtocol, cell: Cell, data: DataSource, **more: Unpack[TrialOptions]
) -> Outcome:
    """Raises KeyboardInterrupt if the user stopped the launch."""
    if cell.device == "cuda":
        limit = time_limit_seconds(cell, next((name for name, _ in gpus()), None))
        cell = cell.model_copy(update={"time_limit_seconds": max(limit, cell.time_limit_seconds)})
    outcome = launcher.run(cell, data, 1, **more)
    if outcome.status == "interrupted":
        raise KeyboardInterrupt
    return outcome


def compared(cells: Sequence[Cell]) -> list[Cell]:
    """Returns the cells and their fp32 twins: all that need references."""
    return [*cells, *(twin for cell in cells if (twin := in_fp32(cell)))]
