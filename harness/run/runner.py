"""Runs what is open of a plan: references, trials in order, progress, resume, stop."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, Protocol

from harness.analysis.losses import mean_losses
from harness.analysis.summary import too_wide
from harness.host.environment import environment, gpus
from harness.host.gpu_models import peak_flops_per_second
from harness.host.gpu_state import GpuLook
from harness.launch.interleaved import InterleavedLauncher
from harness.launch.launcher import Launcher, LauncherProtocol
from harness.launch.outcome import Outcome
from harness.measure.bubble import bubble_fraction
from harness.measure.load import Idle
from harness.parity.judging import allowed_deviation, distance_to_fp32, in_fp32, verdict_of
from harness.parity.reference import Reference
from harness.parity.reference_runs import (
    make_room,
    reference_cell,
    reference_key,
    reference_of,
    split_differently,
)
from harness.parity.verdict import noise_of
from harness.record.plan import Plan
from harness.record.schema import VERSION as SCHEMA_VERSION
from harness.record.status import NOT_AGAIN
from harness.record.store import Store, TrialKey
from harness.run.expected import time_limit_seconds
from harness.run.prepared import PreparedTrial, Surroundings, more_of_the_same, packages
from harness.run.profile import explain_cell
from harness.run.rows import left_out_row, step_rows, trial_row
from harness.spec.cell import Cell
from harness.strategy.registry import required_packages
from harness.workloads import make_workload, prepare_data
from harness.workloads.counts import model_facts


class Watcher(Protocol):
    """What a runner tells while it works; the command line draws it."""

    def preparing(self, what: str) -> None: ...
    def round_added(self, cells: Sequence[Cell]) -> None: ...
    def trial_started(self, cell: Cell, trial: int, position: int) -> None: ...
    def step(self, step: int, seconds: float) -> None: ...
    def trial_finished(self, cell: Cell, row: dict[str, Any]) -> None: ...


Todo = tuple[int, Cell, TrialKey]
"""A trial that is to be launched, its position first."""


@dataclass
class Runner:
    """Runs what is open of a plan, in order, recording each trial as it ends."""

    store: Store
    plan: Plan
    launcher: Callable[[Sequence[str]], LauncherProtocol] = Launcher
    now: Callable[[], float] = time.monotonic
    share: tuple[int, int] = (0, 1)
    """Which part of the plan's cells this runner runs, of how many; others run the rest at the same
    time."""
    _given_up: dict[str, str] = field(default_factory=dict)
    _no_reference: dict[str, str] = field(default_factory=dict)
    _idle: Idle = field(default_factory=Idle)
    _gpus: GpuLook = field(default_factory=GpuLook)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """This runner's share: all trials of a cell run where its first one did."""
        number, of = self.share
        return self.plan.cells[number::of]

    @property
    def all_recorded(self) -> bool:
        """Whether no share of the run has anything left to do."""
        return not replace(self, share=(0, 1)).open_trials()

    def open_trials(self) -> list[Todo]:
        """(position, cell, key) of the trials that have no final record yet."""
        attempts: dict[tuple[str, int], int] = {}
        finished = set()
        for key, status in self.store.statuses(self.plan.run_id).items():
            attempts[key.cell_id, key.trial] = max(
                key.attempt, attempts.get((key.cell_id, key.trial), 0)
            )
            if status != "interrupted":
                finished.add((key.cell_id, key.trial))
            if status in NOT_AGAIN:
                self._given_up[key.cell_id] = status
        todo, own = [], {cell.id for cell in self.cells}
        for position, (cell, trial) in enumerate(self.plan.schedule()):
            if (
                cell.id in own
                and (cell.id, trial) not in finished
                and not (trial > 0 and cell.id in self._given_up)
            ):
                todo.append(
                    (
                        position,
                        cell,
                        TrialKey(cell.id, trial, attempts.get((cell.id, trial), 0) + 1),
                    )
                )
        return todo

    def make_room(self) -> None:
        """Raises UsageError where the disk has too little room for the reference runs that are
        missing; nothing is recorded then."""
        make_room(_compared([cell for _, cell, _ in self.open_trials()]))

    def begin(self) -> bool:
        """Writes the run's row; False where somebody else has begun this run."""
        row = {
            "schema_version": SCHEMA_VERSION,
            "run_id": self.plan.run_id,
            "started_at": datetime.now(timezone.utc),
            "matrix": self.plan.matrix,
            "plan": self.plan.to_json(),
            **environment(required_packages()),
        }
        return self.store.write_run(row)

    def run(self, watcher: Watcher) -> bool:
        """Runs all open trials; False if it was interrupted (what was running is then recorded as
        such)."""
        recorded = self.store.statuses(self.plan.run_id)
        for left in self.plan.left_out[self.share[0] :: self.share[1]]:
            if TrialKey(left.cell.id, 0) not in recorded:
                self.store.write_trial(
                    left_out_row(self.plan.run_id, left.cell, left.status, left.reason), []
                )
        began = self.now()
        todo = self.open_trials() or self.another_round(0.0, watcher)
        if not todo:
            return True
        wanted = [cell for _, cell, _ in todo]
        if self.plan.by_turns:
            watcher.preparing(
                f"importing what ranks need, once for each of {len(self.cells)} cells, which will"
                " train by turns"
            )
        with (
            contextlib.closing(InterleavedLauncher(packages(wanted), len(self.cells)))
            if self.plan.by_turns
            else contextlib.nullcontext()
        ) as ring:
            launcher = ring or self.start(wanted)
            references = self._references(launcher, wanted, watcher)
            while todo:
                if not self._trials(launcher, references, todo, watcher):
                    return False
                todo = self.another_round(self.now() - began, watcher)
        return True

    def another_round(self, spent_seconds: float, watcher: Watcher) -> list[Todo]:
        """A further trial of each cell whose interval is too wide; none where the time that is left
        is too short for it."""
        if self.plan.precision is None:
            return []
        trials = self.store.load([self.plan.run_id], steps=False).trials
        wide = too_wide(trials, self.plan.precision)
        cells = [cell for cell in self.cells if cell.id in wide and cell.id not in self.plan.once]
        trials = trials[trials["cell_id"].isin([cell.id for cell in cells])]
        seconds = trials.groupby("cell_id")["wall_seconds"].median().sum()
        if (
            self.plan.time_budget_seconds is not None
            and spent_seconds + seconds > self.plan.time_budget_seconds
        ):
            return []
        if not cells:
            return []
        watcher.round_added(cells)
        trial, position = int(trials["trial"].max()) + 1, int(trials["position"].max()) + 1
        return [
            (position + i, cell, TrialKey(cell.id, trial, 1))
            for i, cell in enumerate(self.plan.shuffled(cells, trial))
        ]

    def _trials(
        self,
        launcher: LauncherProtocol,
        references: dict[str, Reference],
        todo: Sequence[Todo],
        watcher: Watcher,
    ) -> bool:
        """Runs these trials in order; False if it was interrupted."""
        for group in self._groups(todo):
            now = [one for one in group if self._is_launched(*one, watcher)]
            for position, cell, key in now:
                watcher.trial_started(cell, key.trial, position)
            if isinstance(launcher, InterleavedLauncher):
                rows = self._by_turns(launcher, now, references, watcher.step)
            else:
                rows = [
                    self.one(launcher, cell, key, at, references[reference_key(cell)], watcher.step)
                    for at, cell, key in now
                ]
            for (_, cell, _), row in zip(now, rows, strict=True):
                watcher.trial_finished(cell, row)
                if row["status"] in NOT_AGAIN:
                    self._given_up[cell.id] = row["status"]
            if any(row["status"] == "interrupted" for row in rows):
                return False
        return True

    def _groups(self, todo: Sequence[Todo]) -> list[list[Todo]]:
        """What is launched at once: one trial, or a round."""
        if not self.plan.by_turns:
            return [[one] for one in todo]
        return [list(group) for _, group in itertools.groupby(todo, key=lambda one: one[2].trial)]

    def _is_launched(self, position: int, cell: Cell, key: TrialKey, watcher: Watcher) -> bool:
        """False where an earlier trial ran out of memory or time, or where a cell that needs less
        memory ran out of it.

        The latter is recorded as skipped.
        """
        if cell.id in self._given_up and key.trial > 0:
            return False
        if key.trial == 0 and (
            reason := self._needs_more_memory(cell)
        ):  # later ones have a trial that says it fits
            self._given_up[cell.id] = "skipped"
            row = left_out_row(self.plan.run_id, cell, "skipped", reason) | {
                "attempt": key.attempt,
                "position": position,
            }
            self.store.write_trial(row, [])
            watcher.trial_finished(cell, row)
            return False
        return True

    def explain(self, watcher: Watcher) -> bool:
        """One more launch of each cell that ended ok and is not explained yet; False if it was
        interrupted."""
        loaded = self.store.load([self.plan.run_id], steps=False)
        last = loaded.explained.groupby("cell_id")["attempt"].max().to_dict()
        done = set(loaded.explained[loaded.explained["status"] != "interrupted"]["cell_id"])
        fine = set(loaded.trials[loaded.trials["status"] == "ok"]["cell_id"])
        todo = [cell for cell in self.cells if cell.id in fine - done]
        launcher = self.start(todo) if todo else None
        for number, cell in enumerate(todo, 1):
            watcher.preparing(f"explaining {number} of {len(todo)}: {cell.name}")
            assert launcher is not None
            row = explain_cell(launcher, self.plan.run_id, cell, int(last.get(cell.id, 0)) + 1)
            self.store.write_explained(row)
            if row["status"] == "interrupted":
                return False
        return True

    def start(self, cells: Sequence[Cell]) -> LauncherProtocol:
        """A launcher whose fork server holds what these cells need."""
        return self.launcher(packages(cells))

    def one(
        self,
        launcher: LauncherProtocol,
        cell: Cell,
        key: TrialKey,
        position: int,
        reference: Reference | None,
        heard: Callable[[int, float], None],
    ) -> dict[str, Any]:
        """Launches, judges and records one trial; returns its row.

        Without a reference its parity stays unknown.
        """
        prepared = PreparedTrial(cell, key, position, reference)
        gpus_before, idle_before = self._gpus.states(prepared.gpus), self._idle.before()
        how = prepared.launch
        outcome = launcher.run(how.cell, how.data, how.processes, on_progress=heard, **how.more)
        around = Surroundings(
            gpus_before, self._gpus.states(prepared.gpus), idle_before, self._idle.after()
        )
        return self._record(prepared, outcome, around)

    def _by_turns(
        self,
        ring: InterleavedLauncher,
        todo: Sequence[Todo],
        references: dict[str, Reference],
        heard: Callable[[int, float], None],
    ) -> list[dict[str, Any]]:
        """A round whose launches train by turns: their rows."""
        round_ = [
            PreparedTrial(cell, key, position, references[reference_key(cell)])
            for position, cell, key in todo
        ]
        most = max((one.gpus for one in round_), default=0)
        gpus_before, idle_before = self._gpus.states(most), self._idle.before()
        outcomes = ring.together([one.launch for one in round_], heard)
        around = Surroundings(gpus_before, self._gpus.states(most), idle_before, self._idle.after())
        return [
            self._record(one, outcome, around)
            for one, outcome in zip(round_, outcomes, strict=True)
        ]

    def _record(
        self, prepared: PreparedTrial, outcome: Outcome, around: Surroundings
    ) -> dict[str, Any]:
        """Judges and records a trial; returns its row."""
        cell, key, reference = prepared.cell, prepared.key, prepared.reference
        workload, strategy, layout = prepared.workload, prepared.strategy, prepared.layout
        facts = model_facts(workload, cell.sequence_length)
        known = prepared.known
        reference_losses = known.facts["losses"][: cell.parity_steps] if known else []
        noise = known.noise if known else None
        verdict = None
        losses = mean_losses(outcome.answers) if outcome.status == "ok" else []
        if outcome.status == "ok":
            allowed = allowed_deviation(cell, workload, strategy, layout)
            why_not = (
                self._no_reference.get(reference.folder, "")
                if reference
                else "a probe is not compared with a reference run"
            )
            updates = [a["update_deviations"] for a in outcome.answers]
            verdict = verdict_of(
                cell, workload, allowed, losses, updates, reference_losses, why_not, noise
            )
        gpu = gpus()[0][0] if cell.device == "cuda" and gpus() else None
        peak = peak_flops_per_second(gpu, workload.arithmetic or cell.precision)
        busy = [a["busy_fraction"] for a in outcome.answers if a.get("busy_fraction") is not None]
        row = trial_row(
            self.plan.run_id,
            cell,
            key,
            prepared.position,
            layout,
            strategy.stand_in(cell),
            outcome,
            facts,
            prepared.launch.data.fingerprint,
            verdict,
            reference_losses,
            peak,
            bubble_fraction(busy) if busy else None,
            formula=strategy.states(cell, layout, facts),
            cycle=strategy.cycle,
            wraps_ddp=strategy.same_as_ddp(cell),
            **around.columns(prepared.gpus, outcome),
            reference_loss_noise=noise.loss if noise else None,
            reference_update_noise=noise.update if noise else None,
            fp32_loss_deviation=distance_to_fp32(cell, losses) if losses else None,
        )
        self.store.write_trial(row, step_rows(self.plan.run_id, key, outcome.answers))
        return row

    def _references(
        self, launcher: LauncherProtocol, cells: Sequence[Cell], watcher: Watcher
    ) -> dict[str, Reference]:
        """The reference of every cell; runs those that are not kept from before."""
        found: dict[str, Reference] = {}
        compared = _compared(cells)
        make_room(compared)
        for cell in compared:
            key = reference_key(cell)
            if key in found:
                continue
            found[key] = reference = reference_of(cell)
            if not reference.exists:
                watcher.preparing(
                    f"reference run of {cell.workload}, batch {cell.global_batch}, {cell.optimizer}"
                )
                outcome = self._reference_run(
                    launcher, reference_cell(cell), reference_output=reference.folder
                )
                if outcome.status != "ok":
                    self._no_reference[reference.folder] = (
                        f"the reference run ended {outcome.status}: {outcome.reason}"
                    )
            again = split_differently(reference_cell(cell))
            if again and reference.exists and reference.noise is None:
                watcher.preparing(
                    f"the same with its batch in {again.micro_batches} parts: how far rounding"
                    " alone leads"
                )
                outcome = self._reference_run(launcher, again, reference=reference.folder)
                losses = mean_losses(outcome.answers) if outcome.status == "ok" else []
                noise = (
                    noise_of(
                        losses, outcome.answers[0]["update_deviations"], reference.facts["losses"]
                    )
                    if losses
                    else None
                )
                if noise:
                    reference.note(noise)
        return found

    def _reference_run(self, launcher: LauncherProtocol, cell: Cell, **more: Any) -> Outcome:
        """Runs a reference's cell; raises KeyboardInterrupt where the user stopped it."""
        data = prepare_data(cell.data, make_workload(cell.workload), cell.sequence_length)
        if cell.device == "cuda":
            limit = time_limit_seconds(cell, next((name for name, _ in gpus()), None))
            cell = cell.model_copy(
                update={"time_limit_seconds": max(limit, cell.time_limit_seconds)}
            )
        outcome = launcher.run(cell, data, 1, **more)
        if outcome.status == "interrupted":
            raise KeyboardInterrupt
        return outcome

    def _needs_more_memory(self, cell: Cell) -> str | None:
        """The reason not to try a cell: one that differs only by needing no more of anything ran
        out of memory."""
        for other in self.plan.cells:
            if self._given_up.get(other.id) != "out_of_memory" or other.id == cell.id:
                continue
            if more_of_the_same(cell, other):
                return f"{other.name} ran out of memory and this needs more"
        return None


def _compared(cells: Sequence[Cell]) -> list[Cell]:
    """The cells, and their twins in fp32 where they have one: all that references are needed
    for."""
    return [*cells, *(twin for cell in cells if (twin := in_fp32(cell)))]
