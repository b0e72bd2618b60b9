from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import NamedTuple

from harness.analysis.race import MOST_IN_HEAT
from harness.analysis.ranking import Choice
from harness.cell.cell import Cell
from harness.host.cores import available_memory_bytes
from harness.host.gpu_state import GpuLook, as_json
from harness.launch.interleaved import InterleavedLauncher
from harness.launch.launcher import Launcher, LauncherProtocol
from harness.launch.outcome import Outcome
from harness.measure.hardware_benchmark import measure_apart
from harness.measure.resource_use import Idle
from harness.parity.reference import Reference
from harness.parity.reference_runs import make_room, reference_key
from harness.parity.verdict import compared
from harness.record.plan import Plan
from harness.record.store import Store, TrialKey
from harness.record.trial import NOT_AGAIN, SpeedMeasurement, TrialRecord
from harness.run.allocation import TimeBudget, planned_headline, worth_launching
from harness.run.metrics import (
    device_speed_of,
    left_out_record,
    new_run,
    peaks_of,
    step_records,
    trial_record,
)
from harness.run.prepared import (
    PreparedTrial,
    least_timed_seconds,
    may_be_in_heat,
    needs_at_least_as_much_as,
    packages,
)
from harness.run.profile import profile_cell
from harness.run.references import ReferenceRuns
from harness.seam.registry import make_strategy
from harness.worker.spec import STEPS_IN_A_TURN

HEAT_SECONDS = 3.0
"""Minimum timed seconds of an interleaved trial of the race, which is part of a heat."""
LAUNCH_SPREAD = 0.008
"""Standard deviation of log throughput between launches, which longer heats do not reduce
(docs/studies/run-precision.md#longer-heats)."""
FEWEST_TURNS, MOST_TURNS = 6, 48
RESERVED = 1.1
"""Time that the headline's race leaves for each later planned trial, over the mean of the separate
trials so far."""
REPEATED = ("interrupted", "unavailable")
"""Statuses of scheduled trials that a resumed run repeats: missing nodes may be back."""
RANK_BYTES = 400 * 2**20
"""Resident memory of a process that has imported the libraries."""


class ProgressListener:
    """Receives a run's progress and ignores it; subclasses show it."""

    def preparing(self, what: str) -> None: ...
    def round_added(self, cells: Sequence[Cell], among: str) -> None: ...
    def time_is_spent(self, left_out: int) -> None: ...
    def trial_started(self, cell: Cell, trial: int, position: int) -> None: ...
    def step(self, step: int, seconds: float) -> None: ...
    def trial_finished(self, cell: Cell, trial: TrialRecord) -> None: ...


class PendingTrial(NamedTuple):
    position: int
    cell: Cell
    key: TrialKey
    interleaved: bool = False
    """Whether it is interleaved with the pending trials of the same number."""


@dataclass
class Runner:
    """Runs a plan's open trials, recording each as it ends."""

    store: Store
    plan: Plan
    launcher: Callable[[Sequence[str]], LauncherProtocol] = Launcher
    now: Callable[[], float] = time.monotonic
    share: tuple[int, int] = (0, 1)
    """Number of this runner's share of the cells, and number of shares."""
    measure_gpu: Callable[[], SpeedMeasurement] = measure_apart
    baseline: Choice | None = None
    """Selects the baseline cell. By default DDP, or the single process if the run has no DDP."""
    _budget: TimeBudget = field(init=False)
    _recorded: list[TrialRecord] | None = None
    """Trials of this run. None before the first further round."""
    _heats: InterleavedLauncher | None = None
    _given_up: dict[str, str] = field(default_factory=dict)
    _references: ReferenceRuns = field(default_factory=ReferenceRuns)
    _idle: Idle = field(default_factory=Idle)
    _gpus: GpuLook = field(default_factory=GpuLook)

    @property
    def cells(self) -> tuple[Cell, ...]:
        number, of = self.share
        return self.plan.cells[number::of]

    @functools.cached_property
    def _device_speed(self) -> str | None:
        return device_speed_of(self.store, self.plan)

    @property
    def all_recorded(self) -> bool:
        """Whether every share is complete, even if nodes were missing."""
        return not replace(self, share=(0, 1)).open_trials(("interrupted",))

    def open_trials(self, repeated: Sequence[str] = REPEATED) -> list[PendingTrial]:
        """Returns the scheduled trials that have no record, or only records with these statuses."""
        attempts: dict[tuple[str, int], int] = {}
        finished = set()
        for key, status in self.store.statuses(self.plan.run_id).items():
            attempts[key.cell_id, key.trial] = max(
                key.attempt, attempts.get((key.cell_id, key.trial), 0)
            )
            if status not in repeated:
                finished.add((key.cell_id, key.trial))
            if status in NOT_AGAIN:
                self._given_up[key.cell_id] = status
        pending, cell_ids = [], {cell.id for cell in self.cells}
        for position, (cell, trial) in enumerate(self.plan.schedule()):
            if (
                cell.id in cell_ids
                and (cell.id, trial) not in finished
                and not (trial > 0 and cell.id in self._given_up)
            ):
                key = TrialKey(cell.id, trial, attempts.get((cell.id, trial), 0) + 1)
                pending.append(PendingTrial(position, cell, key))
        return pending

    def make_room(self) -> None:
        """Evicts old references. Raises UsageError if the missing references do not fit on the
        disk."""
        make_room(compared([trial.cell for trial in self.open_trials()]))

    def begin(self) -> bool:
        """Writes the run's row; returns False if another process has begun this run."""
        return self.store.write_run(new_run(self.plan, self.measure_gpu))

    def run(self, listener: ProgressListener) -> bool:
        """Runs all open trials; returns False if interrupted."""
        recorded = self.store.statuses(self.plan.run_id)
        for left in self.plan.left_out[self.share[0] :: self.share[1]]:
            if TrialKey(left.cell.id, 0) not in recorded:
                self.store.write_trial(
                    left_out_record(self.plan.run_id, left.cell, left.status, left.reason)
                )
        self._budget = TimeBudget(self.plan, self.now, self.store.ended_trials(self.plan.run_id))
        wanted = [trial.cell for trial in self.open_trials()]
        batches = self._batches(listener)
        if not (pending := next(batches, [])):
            return True
        with contextlib.ExitStack() as resources:
            resources.callback(self._end_heats)
            launcher = self.start(wanted or [trial.cell for trial in pending])
            references: dict[str, Reference] = {}

            def launch(group: Sequence[PendingTrial]) -> list[TrialRecord]:
                if group and group[0].interleaved:
                    heats = self._launcher_of_heats(launcher, pending, listener)
                    steps = self._steps_of_heat([trial.cell for trial in group])
                    return self._interleaved(
                        heats, launcher, group, references, listener.step, steps
                    )
                return [
                    self.run_trial(
                        launcher, cell, key, at, references.get(reference_key(cell)), listener.step
                    )
                    for at, cell, key, _ in group
                ]

            while pending:
                # In a resumed run, a further round may need references that no open trial did.
                wanted += [trial.cell for trial in pending]
                missing = [c for c in compared(wanted) if reference_key(c) not in references]
                wanted = []
                if missing:
                    references |= self._references.of(launcher, missing, listener.preparing)
                if not self._trials(launch, pending, listener):
                    return False
                pending = next(batches, [])
        return True

    def _batches(self, listener: ProgressListener) -> Iterator[list[PendingTrial]]:
        """Yields the headline's planned trials and its race, then the other planned trials and the
        race of all settings. Without a time budget, or if it may drop planned trials, all planned
        trials come first."""
        first, others = self.open_trials(), list[PendingTrial]()
        may_wait = self.plan.until_answered and self.plan.time_budget_seconds is not None
        found = planned_headline(self.plan, chosen=self.baseline)
        if found and may_wait and self.share[1] == 1 and self.plan.spare_from == self._planned:
            headline = {cell.id for cell in found[0]}
            others = [trial for trial in first if trial.cell.id not in headline]
            first = [trial for trial in first if trial.cell.id in headline]
        for planned, later in ((first, others), (others, [])):
            pending = planned or self.plan_extra_round(listener, later)
            while pending:
                yield pending
                pending = self.plan_extra_round(listener, later)
            self._end_heats()  # Its processes would take memory from the planned trials.

    @functools.cached_property
    def _planned(self) -> int:
        return len(self.plan.schedule())

    def _launcher_of_heats(
        self,
        launcher: LauncherProtocol,
        pending: Sequence[PendingTrial],
        listener: ProgressListener,
    ) -> InterleavedLauncher:
        """Returns the launcher of heats (interleaved batches of trials), started if necessary."""
        if self._heats is None:
            listener.preparing("importing packages for trials that train interleaved")
            racing = packages([trial.cell for trial in pending])
            self._heats = InterleavedLauncher(racing, min(MOST_IN_HEAT, len(self.cells)))
        for pid in self._heats.pids:
            launcher.ignore_pid(pid)
        return self._heats

    def _end_heats(self) -> None:
        if self._heats is not None:
            self._heats.close()
            self._heats = None

    def plan_extra_round(
        self, listener: ProgressListener, later: Sequence[PendingTrial] = ()
    ) -> list[PendingTrial]:
        """Returns the trials that `worth_launching` chooses and for which there is time. `later`:
        planned trials of other settings than the headline, for which time is reserved."""
        if not self.plan.until_answered or self.share[1] > 1:
            return []  # One share of the cells cannot show which cell is fastest.
        if self._recorded is None:
            trials = self.store.load([self.plan.run_id], steps=False).trials
            self._recorded = TrialRecord.from_frame(trials)
        headline_only = bool(later) or self._budget.for_headline()
        chosen = worth_launching(self.plan, self._recorded, self.baseline, headline_only)
        by_id = {cell.id: cell for cell in self.cells}
        heats = [[by_id[name] for name in heat] for heat in chosen]
        wanted = list(dict.fromkeys(cell.id for heat in heats for cell in heat))
        if not wanted:
            return []
        number = max(trial.trial for trial in self._recorded) + 1
        fit = [[cell for cell in heat if may_be_in_heat(cell)] for heat in heats]
        groups = [heat for heat in fit if len(heat) > 1 and self._may_interleave(heat)]
        in_heats = {cell.id for group in groups for cell in group}
        groups += [[by_id[name]] for name in wanted if name not in in_heats]
        seconds = {str(at): self._group_seconds(group, number) for at, group in enumerate(groups)}
        took = [t.wall_seconds for t in self._recorded if t.wall_seconds and not t.turn_began]
        reserved = RESERVED * len(later) * fmean(took) if took else 0.0
        fitting = self._budget.shortest_that_fit(seconds, reserved)
        launched = [group for at, group in enumerate(groups) if str(at) in fitting]
        if not launched:
            return []
        listener.round_added(
            [cell for group in launched for cell in group],
            f"{len(wanted)} cells that may still be the fastest, or are compared with these",
        )
        alone = {group[0].id for group in launched if len(group) == 1}
        rounds = [group for group in launched if len(group) > 1]
        rounds.append([cell for cell in self.cells if cell.id in alone])
        numbered = [
            (cell, TrialKey(cell.id, number + at, 1), at < len(rounds) - 1)
            for at, cells in enumerate(rounds)
            for cell in self.plan.shuffled(cells, number + at)
        ]
        position = max(self._planned, *(trial.position + 1 for trial in self._recorded))
        return [PendingTrial(position + at, *trial) for at, trial in enumerate(numbered)]

    def _may_interleave(self, cells: Sequence[Cell]) -> bool:
        if self.launcher is not Launcher or not self.plan.timed_seconds:
            return False
        peaks = {trial.cell_id: trial.peak_memory_bytes or 0 for trial in self._recorded or ()}
        ranks = [make_strategy(cell).layout(cell.devices).processes for cell in cells]
        needed = sum(
            count * (RANK_BYTES + peaks.get(cell.id, 0))
            for count, cell in zip(ranks, cells, strict=True)
        )
        return needed + MOST_IN_HEAT * RANK_BYTES < available_memory_bytes()

    def _steps_of_heat(self, cells: Sequence[Cell]) -> int:
        ids = {cell.id for cell in cells}
        seconds = [
            trial.step_seconds_mean
            for trial in self._recorded or ()
            if trial.cell_id in ids and trial.step_seconds_mean
        ]
        steps = self._heat_seconds(ids) / median(seconds) if seconds else 0
        turns = min(max(steps / STEPS_IN_A_TURN, FEWEST_TURNS), MOST_TURNS)
        return STEPS_IN_A_TURN * math.ceil(turns)

    def _heat_seconds(self, cell_ids: Collection[str]) -> float:
        """Returns the timed seconds of a trial for which heats tell most per second of the run.

        With a start of S seconds, a variance of v per timed second and L² between launches, the
        cost of a given precision, (S + t) * (L² + v / t), is least at t² = S * v / L². A turn takes
        half as long again as its timed steps, but a median over turns is half as variable again.
        """
        starts, noise = [], []
        for trial in self._recorded or ():
            step = trial.step_seconds_mean
            if trial.cell_id in cell_ids and step and len(trial.turn_samples_per_second) > 1:
                logs = map(math.log, trial.turn_samples_per_second)
                squares = [(after - before) ** 2 for before, after in itertools.pairwise(logs)]
                noise.append(fmean(squares) / 2 * STEPS_IN_A_TURN * step)
                starts.append((trial.wall_seconds or 0.0) - (trial.steps_taken or 0) * step)
        if not noise:
            return HEAT_SECONDS
        best = math.sqrt(max(0.0, fmean(starts)) * median(noise)) / LAUNCH_SPREAD
        return max(HEAT_SECONDS, best)

    def _group_seconds(self, cells: Sequence[Cell], trial: int) -> float:
        turns = self._steps_of_heat(cells) // STEPS_IN_A_TURN if len(cells) > 1 else 0
        return sum(self._seconds(cell, trial, turns) for cell in cells)

    def _seconds(self, cell: Cell, trial: int, turns: int) -> float:
        """Returns the expected duration of a trial, from the cell's trials of the same kind and
        nearest length. `turns`: number of the trial's turns in a heat; 0 for a separate trial."""
        earlier = [recorded for recorded in self._recorded or () if recorded.cell_id == cell.id]
        steps = [recorded.step_seconds_mean for recorded in earlier if recorded.step_seconds_mean]
        step_seconds = median(steps) if steps else 0.0

        def timed(number: int, turns: int) -> float:
            if turns:
                return max(HEAT_SECONDS, turns * (STEPS_IN_A_TURN + 1) * step_seconds)
            seconds = least_timed_seconds(cell, self.plan.timed_seconds_of(cell, number))
            return max(seconds, cell.timed_steps * step_seconds)

        expected: dict[tuple[bool, float], list[float]] = {}
        for recorded in earlier:
            before = len(recorded.turn_began)
            longer = timed(trial, turns) - timed(recorded.trial, before)
            seconds = (recorded.wall_seconds or 0.0) + longer
            expected.setdefault((bool(before) != bool(turns), abs(longer)), []).append(seconds)
        return median(expected[min(expected)])

    def _trials(
        self,
        launch: Callable[[Sequence[PendingTrial]], list[TrialRecord]],
        pending: Sequence[PendingTrial],
        listener: ProgressListener,
    ) -> bool:
        """Runs these trials in order, one group per `launch`; returns False if interrupted."""
        for group in self._groups(pending):
            launched = [trial for trial in group if self._is_launched(trial, pending, listener)]
            for trial in launched:
                listener.trial_started(trial.cell, trial.key.trial, trial.position)
            trials = launch(launched)
            if self._recorded is not None:
                self._recorded += trials
            for (_, cell, *_), record in zip(launched, trials, strict=True):
                listener.trial_finished(cell, record)
                self._budget.took[cell.id] = record.wall_seconds or 0.0
                if record.status in NOT_AGAIN:
                    self._given_up[cell.id] = record.status
            if any(record.status == "interrupted" for record in trials):
                return False
        if self._budget.left_out:
            listener.time_is_spent(self._budget.left_out)
            self._budget.left_out = 0
        return True

    def _groups(self, pending: Sequence[PendingTrial]) -> list[list[PendingTrial]]:
        def group(trial: PendingTrial) -> tuple[int, int]:
            return trial.key.trial, 0 if trial.interleaved else trial.position

        return [list(trials) for _, trials in itertools.groupby(pending, key=group)]

    def _is_launched(
        self, trial: PendingTrial, pending: Sequence[PendingTrial], listener: ProgressListener
    ) -> bool:
        """Returns whether to launch a trial: False if the cell ran out of memory or time, or the
        time budget is spent.

        If a cell that needs no more memory ran out of it, records this trial as skipped.
        """
        position, cell, key, _ = trial
        if cell.id in self._given_up and key.trial > 0:
            return False
        # Further rounds fit the time budget.
        if position < self._planned and self.share[1] == 1:
            still_planned = (
                other.cell
                for other in pending
                if other.position >= position and other.cell.id not in self._given_up
            )
            if self._budget.leaves_out(position, cell, still_planned):
                return False
        # Later trials only run if the first one fitted.
        if key.trial == 0 and (reason := self._needs_more_memory(cell)):
            self._given_up[cell.id] = "skipped"
            skipped = left_out_record(
                self.plan.run_id, cell, "skipped", reason, key.attempt, position
            )
            self.store.write_trial(skipped)
            listener.trial_finished(cell, skipped)
            return False
        return True

    def explain(self, listener: ProgressListener) -> bool:
        """Profiles each ok cell that has no profile; returns False if interrupted."""
        loaded = self.store.load([self.plan.run_id], steps=False)
        last = loaded.explained.groupby("cell_id")["attempt"].max().to_dict()
        done = set(loaded.explained[loaded.explained["status"] != "interrupted"]["cell_id"])
        fine = set(loaded.trials[loaded.trials["status"] == "ok"]["cell_id"])
        todo = [cell for cell in self.cells if cell.id in fine - done]
        launcher = self.start(todo) if todo else None
        for number, cell in enumerate(todo, 1):
            listener.preparing(f"profiling {number} of {len(todo)}: {cell.name}")
            assert launcher is not None
            attempt = int(last.get(cell.id, 0)) + 1
            profile = profile_cell(launcher, self.plan.run_id, cell, attempt)
            self.store.write_profile(profile)
            if profile.status == "interrupted":
                return False
        return True

    def start(self, cells: Sequence[Cell]) -> LauncherProtocol:
        return self.launcher(packages(cells))

    def run_trial(
        self,
        launcher: LauncherProtocol,
        cell: Cell,
        key: TrialKey,
        position: int,
        reference: Reference | None,
        on_progress: Callable[[int, float], None],
    ) -> TrialRecord:
        seconds = self.plan.timed_seconds_of(cell, key.trial)
        seed, launches = self.plan.order_seed, self.plan.trials_of(cell)
        prepared = PreparedTrial(cell, key, position, reference, seconds, seed, launches)
        (recorded,) = self._launched(
            [prepared], lambda: [prepared.run(launcher, on_progress)], launcher
        )
        return recorded

    def _interleaved(
        self,
        interleaved: InterleavedLauncher,
        launcher: LauncherProtocol,
        pending: Sequence[PendingTrial],
        references: dict[str, Reference],
        on_progress: Callable[[int, float], None],
        timed_steps: int,
    ) -> list[TrialRecord]:
        round_ = [
            PreparedTrial(cell, key, at, references[reference_key(cell)], timed_steps=timed_steps)
            for at, cell, key, _ in pending
        ]
        launches = [trial.launch for trial in round_]
        return self._launched(round_, lambda: interleaved.together(launches, on_progress), launcher)

    def _launched(
        self,
        trials: Sequence[PreparedTrial],
        launch: Callable[[], Sequence[Outcome]],
        launcher: LauncherProtocol,
    ) -> list[TrialRecord]:
        """Records trials, and the machine's state around them."""
        most = max((trial.gpus for trial in trials), default=0)
        gpus_before, idle_before = self._gpus.states(most), self._idle.before()
        outcomes = launch()
        gpus_after, idle_after = self._gpus.states(most), self._idle.after()
        records, long_seed = [], self.plan.order_seed if self.plan.long_training else None
        for prepared, outcome in zip(trials, outcomes, strict=True):
            verification = self._references.verify(launcher, prepared, outcome, long_seed)
            peaks = peaks_of(prepared.cell, prepared.workload, self._device_speed)
            ranks = {answer.pid for answer in outcome.answers}
            gpus = prepared.gpus
            trial = replace(
                trial_record(self.plan.run_id, prepared, outcome, verification, peaks),
                gpu_before=as_json(gpus_before[:gpus]),
                # The trial's own ranks may still be exiting.
                gpu_after=as_json([state.without(ranks) for state in gpus_after[:gpus]]),
                idle_before=idle_before,
                idle_after=idle_after,
            )
            self.store.require_run(self.plan.run_id)
            steps = step_records(self.plan.run_id, prepared.key, outcome.answers)
            self.store.write_trial(trial, steps)
            records.append(trial)
        return records

    def _needs_more_memory(self, cell: Cell) -> str | None:
        for other in self.plan.cells:
            if self._given_up.get(other.id) != "out_of_memory" or other.id == cell.id:
                continue
            if needs_at_least_as_much_as(cell, other):
                return f"{other.name} ran out of memory, and this needs at least as much"
        return None
