"""The reference runs that a run's trials are compared with."""

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
"""A reference run whose losses go on after the parity segment takes so many times the steps that
are asked for."""


@dataclass
class ReferenceRuns:
    """Keeps reference runs on disk, and launches those that are missing."""

    failures: dict[str, str] = field(default_factory=dict)
    """Why a reference run failed, by its folder."""

    def of(
        self,
        launcher: LauncherProtocol,
        cells: Sequence[Cell],
        announce: Callable[[str], None],
    ) -> dict[str, Reference]:
        """The reference of every cell, by its key (see `reference_key`).

        `announce`: is told of each launch. Raises KeyboardInterrupt where the user stops one.
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
        """Launches what is missing of a reference: the run itself, and the one that shows its
        noise."""
        data = prepare_data(cell.data, make_workload(cell.workload), cell.sequence_length)
        if not reference.exists:
            announce(
                f"reference run of {cell.workload}, batch {cell.global_batch}, {cell.optimizer}"
            )
            outcome = _launch(
                launcher, reference_cell(cell), data, reference_output=reference.folder
            )
            if outcome.status != "ok":
                self.failures[reference.folder] = (
                    f"the reference run ended {outcome.status}: {outcome.reason}"
                )
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
        """The verdict on a trial, by a reference that goes as far as it does. Where its losses
        leave what low precision was thought to do, references in that precision are run too.
        """
        cell, reference = prepared.cell, prepared.reference
        if reference is None:
            return verified(prepared, outcome, "a probe is not compared with a reference run")
        grows = prepared.known is not None and outcome.status == "ok"
        if grows:
            self.grow(launcher, cell, reference, outcome)
        why_not = self.failures.get(reference.folder, "")
        verification = verified(prepared, outcome, why_not)
        verdict = verification.verdict
        in_segment = not verification.later_deviations
        if not verdict or verdict.verdict != "diverged" or in_segment:
            return verification
        if not grows or cell.precision not in PRECISION:
            return verification
        self._grow_in_precision(launcher, cell, reference)
        return verified(prepared, outcome, why_not)

    def _grow_in_precision(
        self, launcher: LauncherProtocol, cell: Cell, reference: Reference
    ) -> None:
        """Sees to it that the reference of a cell knows how far its losses are, at each step, from
        those of the same training in the cell's precision: the larger deviation of two runs, which
        differ in rounding."""
        known = reference.all_losses
        if len(reference.precision_drift(cell.precision)) >= len(known):
            return
        longer = _with_steps(cell, len(known)).model_copy(update={"precision": cell.precision})
        data = prepare_data(cell.data, make_workload(cell.workload), cell.sequence_length)
        runs = [
            _losses_of(launcher, *one)
            for one in ((longer, data), rounded_differently(longer, data))
        ]
        deviations = [loss_deviations(own, known) for own in runs if len(own) == len(known)]
        if deviations:
            largest = [max(at) for at in zip(*deviations, strict=True)]
            reference.note_precision_drift(cell.precision, largest)

    def grow(
        self, launcher: LauncherProtocol, cell: Cell, reference: Reference, outcome: Outcome
    ) -> None:
        """Sees to it that the reference of a cell has the losses of as many steps of the training
        as a trial took, and their drift, by launches of its own where it has fewer; it stays as it
        is where these do not end well."""
        taken = outcome.trained[0].steps
        steps = 1 + max(s.step if s.training_step is None else s.training_step for s in taken)
        if len(reference.all_losses) >= steps:
            return
        # Another cell may take more of them.
        longer = _with_steps(cell, math.ceil(SPARE_STEPS * steps))
        data = prepare_data(cell.data, make_workload(cell.workload), cell.sequence_length)
        losses = _losses_of(launcher, longer, data)
        again = _losses_of(launcher, *rounded_differently(longer, data)) if losses else []
        if losses:
            drift = loss_deviations(again, losses) if len(again) == len(losses) else []
            # Without any the two runs rounded alike, which tells nothing of others.
            reference.note_losses(losses, drift if any(drift) else [])


def _with_steps(cell: Cell, steps: int) -> Cell:
    """The reference cell of a cell, with so many steps."""
    longer = reference_cell(cell)
    changes = {"timed_steps": steps - longer.warmup_steps}
    if cell.device == "cpu":  # nobody compares how long it takes
        changes["threads_per_device"] = len(allowed_cores())
    return longer.model_copy(update=changes)


def _losses_of(launcher: LauncherProtocol, cell: Cell, data: DataSource) -> list[float]:
    """The losses of a reference run; empty where it does not end well."""
    outcome = _launch(launcher, cell, data)
    if outcome.status != "ok":
        return []
    losses = mean_losses([[step.loss for step in outcome.trained[0].steps]])
    return [loss for loss in losses if loss is not None]


def _launch(
    launcher: LauncherProtocol, cell: Cell, data: DataSource, **more: Unpack[TrialOptions]
) -> Outcome:
    """Launches a reference run; raises KeyboardInterrupt where the user stopped it."""
    if cell.device == "cuda":
        limit = time_limit_seconds(cell, next((name for name, _ in gpus()), None))
        cell = cell.model_copy(update={"time_limit_seconds": max(limit, cell.time_limit_seconds)})
    outcome = launcher.run(cell, data, 1, **more)
    if outcome.status == "interrupted":
        raise KeyboardInterrupt
    return outcome


def compared(cells: Sequence[Cell]) -> list[Cell]:
    """The cells, and their twins in fp32 where they have one: all that references are needed
    for."""
    return [*cells, *(twin for cell in cells if (twin := in_fp32(cell)))]
