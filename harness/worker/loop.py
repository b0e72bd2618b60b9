"""The training loop of one rank: its steps, and what is looked at between them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import replace

from harness.measure.bubble import busy_fraction
from harness.measure.clock import timed_step
from harness.measure.energy import Energy
from harness.measure.gpu_use import RankGpus
from harness.measure.load import Load
from harness.measure.memory import MemoryMeter
from harness.measure.routing import ExpertTokens, counted, routers_of
from harness.measure.traffic import Traffic, folder_bytes
from harness.parity.deviations import update_deviations
from harness.parity.reference import Reference
from harness.spec.training import Batch, TrainStep
from harness.strategy.job import Job
from harness.worker.answer import Offload, RankStates, RankStep
from harness.worker.batches import Batches
from harness.worker.compilation import compile_seconds
from harness.worker.control import Control
from harness.worker.heartbeat import Heartbeat
from harness.worker.interleave import Place
from harness.worker.progress import Progress
from harness.worker.set_back import FIRST_WITHIN, REPLAYED_STEPS, SetBacks
from harness.worker.spec import TrialSpec
from harness.worker.states import states_of

MOST_TIMED_STEPS = 200
"""However short they are."""


class Loop:
    """The training loop of one rank: steps, peaks, the look at the parameters after the parity
    segment."""

    def __init__(
        self,
        spec: TrialSpec,
        job: Job,
        step: TrainStep,
        meter: MemoryMeter,
        control: Control | None = None,
        heartbeat: Heartbeat | None = None,
        set_backs: SetBacks | None = None,
    ) -> None:
        self.spec, self.job, self.step, self.meter = spec, job, step, meter
        self.control, self.heartbeat, self.set_backs = control, heartbeat, set_backs
        self.training_step = 0
        """Of the next step: its batch, and the reference's step that it is compared with."""
        self.paused_seconds = 0.0
        """Time for which the control ran while traffic, energy and load were counted."""
        self.progress = Progress(spec.progress if job.rank == 0 else None)
        self.steps: list[RankStep] = []
        self.peak_allocated: int | None = None
        self.peak_reserved: int | None = None
        self.peak_host: int | None = None
        self.peaks_noted = False
        """Whether the state was set back: what that leaves in the heap is none of the training's.
        """
        self.deviations: list[dict[str, float]] = []
        """Of each tensor at the end of the parity segment, and each time it was trained again."""
        self.states: RankStates | None = None
        """What this rank holds between steps, once `verify` has looked."""
        self.expert_tokens: ExpertTokens | None = {} if job.workload.mixture_path else None
        """None where the model has no mixture of experts whose router is known."""
        self.settling = False
        self.compile_seconds = 0.0
        """That torch.compile took before the first timed step."""
        self.timed = 0
        """Timed steps so far."""
        self.planned = job.cell.timed_steps
        """Timed steps that are to be taken."""
        self.traffic = Traffic(
            over_tcp=job.device.type == "cpu"
            and job.train_state is not None
            and job.train_state.over_tcp
        )
        self.gpus = RankGpus(meter.devices)
        self.load, self.energy = Load(), Energy.of(self.gpus, job.rank)
        self._counted_from: int | None = None
        self.place = Place(spec.turns.address) if spec.turns else None
        self.slices_began: list[tuple[int, float]] = []
        """First step of each time slice, and when that began, in seconds after the epoch."""
        share = job.layout.share(job.rank)
        size = job.cell.global_batch // job.layout.shares
        rows = slice(share * size, (share + 1) * size)
        self.batches = Batches(spec.data, job.cell.seed, job.cell.global_batch, rows, job.device)

    def synchronize(self) -> None:
        """Waits for all that this process's devices were given to do."""
        if self.job.device.type == "cuda":
            import torch

            for device in self.job.devices:
                torch.cuda.synchronize(device)

    def fetch(self, index: int) -> Batch:
        return self.batches.fetch(self.training_step, index)

    def start_counting(self) -> None:
        """Reads the counters of traffic, energy and load before a stretch of timed steps. They are
        read between steps, so that no step's time includes it."""
        self._counted_from = len(self.steps)
        self.traffic.start()
        self.gpus.start()
        self.energy.start()
        self.load.start()

    def stop_counting(self) -> None:
        self.load.stop()
        self.energy.stop()
        self.gpus.stop()
        self.traffic.stop(0 if self._counted_from is None else len(self.steps) - self._counted_from)
        self._counted_from = None

    def per_step(self, total: float | None) -> float | None:
        return total / self.traffic.steps if total is not None and self.traffic.steps else None

    def offload(self) -> Offload | None:
        """What travelled to and from the disk per step, and what lies there; None where the
        strategy keeps nothing there."""
        train_state = self.job.train_state
        if train_state is None or train_state.offload_folder is None:
            return None
        return Offload(
            self.per_step(self.traffic.disk_read),
            self.per_step(self.traffic.disk_written),
            folder_bytes(train_state.offload_folder),
        )

    @property
    def counted(self) -> bool:
        """Whether the trial takes steps until enough of them are timed, as by turns and by time."""
        timed = self.control is not None and self.spec.timed_seconds > 0
        return self.spec.turns is not None or timed

    def over(self) -> bool:
        """Whether all steps were taken; by turns and by time more of them than the cell says, and
        where the state is set back, at least once and to the end of what is trained again."""
        if self.set_backs and (
            not self.set_backs.count or self.training_step < self.job.cell.parity_steps
        ):
            return False
        return len(self.steps) >= self.job.cell.total_steps and (
            not self.counted or self.timed >= self.planned
        )

    def keep_or_set_back(self, set_backs: SetBacks) -> None:
        """Before a step: sets the state aside, or back to what was set aside. The step after that
        does not count: caches are cold."""
        train_state, number = self.job.train_state, len(self.steps)
        assert train_state is not None
        if set_backs.keeps(self.training_step):
            self._without_counting(lambda: set_backs.keep(train_state, number))
        elif (
            self.training_step >= self.job.cell.parity_steps
            and self._knows_what_is_left()
            and set_backs.due(number, self.planned - self.timed)
        ):
            self.note_peak()
            self.peaks_noted = True
            self._without_counting(lambda: set_backs.set_back(train_state))
            self.training_step = set_backs.from_step

    def _knows_what_is_left(self) -> bool:
        """Whether the ranks have agreed how many steps are to be timed, or many are left anyway."""
        steps_left = self.job.cell.timed_steps - self.timed
        many = steps_left > FIRST_WITHIN + REPLAYED_STEPS
        return self.control is None or steps_left <= 0 or many

    def _without_counting(self, work: Callable[[], None]) -> None:
        self.stop_counting()
        with self.meter.unlimited():
            work()
        self.synchronize()
        self.settling = True

    def counting_tokens(self, index: int) -> contextlib.AbstractContextManager[None]:
        """In the last warm-up step the tokens of each expert are counted. Of tensor-parallel ranks,
        which see the same samples, one counts."""
        job = self.job
        counts = index == job.cell.warmup_steps - 1 and job.rank % job.layout.tensor == 0
        if self.expert_tokens is None or job.train_state is None or not counts:
            return contextlib.nullcontext()
        routers = job.train_state.routers or routers_of(job.train_state.model, job.workload)
        return counted(routers, self.expert_tokens)

    def take_turn(self, index: int) -> None:
        """Waits for it. The step after that does not count: caches are cold."""
        assert self.place is not None
        self.stop_counting()
        last = self.steps[-1].step_seconds
        self.slices_began.append((index, self.place.wait(index - len(self.slices_began) - 1, last)))
        self.settling = True
        if self.heartbeat:
            self.heartbeat.forget()

    def run_step(self, index: int) -> None:
        if self.set_backs:
            self.keep_or_set_back(self.set_backs)
        if self.spec.turns and self.spec.turns.begins(index - self.job.cell.warmup_steps):
            self.take_turn(index)
        if index == self.job.cell.warmup_steps and self.job.cell.compile != "none":
            self.compile_seconds = compile_seconds()
            self.meter.reset()  # a compiler's memory is none of the training's
        if index + 1 == self.job.cell.total_steps and not (self.timed or self.counted):
            self.settling = False  # there is no other step that could be timed
        if self._counted_from is None and index >= self.job.cell.warmup_steps and not self.settling:
            self.start_counting()
        with self.counting_tokens(index):
            loss, took = timed_step(lambda: self.fetch(index), self.step, self.synchronize)
        warm = index < self.job.cell.warmup_steps
        phase = "warmup" if warm else "settling" if self.settling else "timed"
        self.settling = False
        self.timed += phase == "timed"
        value = None if loss is None else float(loss.detach())
        self.steps.append(
            RankStep(
                took.data_seconds,
                took.step_seconds,
                index,
                phase,
                value,
                training_step=self.training_step,
            )
        )
        self.training_step += 1
        self.progress.tell(index, took.step_seconds)
        if self.control:
            self._pause(self.control, phase == "timed")
        if self.heartbeat:
            self.heartbeat.beat(f"step {index + 1}", index + 1)

    def _pause(self, control: Control, timed: bool) -> None:
        """Lets the control run; after the cell's number of timed steps the ranks agree how many
        more there are."""
        agree = timed and self.timed == self.job.cell.timed_steps
        if not agree and len(self.steps) % control.every:
            return
        began = time.perf_counter()
        pause = control.pause(self._mean_step_seconds() if agree else 0.0)
        last = self.steps[-1]
        self.steps[-1] = replace(
            last,
            step_seconds=last.step_seconds + pause.left_over_seconds,
            control_seconds=pause.control_seconds,
            left_over_seconds=pause.left_over_seconds,
        )
        if self._counted_from is not None:
            self.paused_seconds += time.perf_counter() - began
            self.load.own += pause.control_cpu_seconds
        if agree and pause.largest:
            wanted = math.ceil(self.spec.timed_seconds / pause.largest)
            self.planned = max(self.planned, min(wanted, MOST_TIMED_STEPS))

    def _mean_step_seconds(self) -> float:
        seconds = [step.step_seconds for step in self.steps if step.phase == "timed"]
        return sum(seconds) / len(seconds)

    def joules_per_step(self) -> float | None:
        """Energy of a timed step; the control's share, by its time, does not count."""
        joules = self.per_step(self.energy.joules)
        if joules is None or not self.load.seconds:
            return joules
        return joules * (1 - self.paused_seconds / self.load.seconds)

    def note_peak(self) -> None:
        """Takes the peaks since the last look; those of steps that are trained again are not."""
        if self.peaks_noted:
            return
        peak = self.meter.peak()
        self.meter.method = peak.method
        self.peak_allocated = _larger(self.peak_allocated, peak.allocated)
        self.peak_reserved = _larger(self.peak_reserved, peak.reserved)
        self.peak_host = _larger(self.peak_host, peak.host)

    def verify(self) -> None:
        """Compares or saves the parameters; what that costs in memory is not counted, nor is the
        step that follows it."""
        self.stop_counting()
        self.note_peak()
        train_state, workload = self.job.train_state, self.job.workload
        assert train_state is not None
        self.states = self.states or states_of(train_state, workload, self.job.device.type)
        with self.meter.unlimited():
            if self.spec.reference_output:
                losses = [step.loss for step in self.steps if step.loss is not None]
                initial = workload.build(self.job.cell.seed, self.job.device)
                Reference(self.spec.reference_output).save(
                    workload, train_state.model, initial, losses
                )
            if self.spec.reference:
                reference = Reference(self.spec.reference)
                self.deviations.append(update_deviations(train_state, workload, reference))
        self.meter.reset()
        if self.heartbeat:
            self.heartbeat.beat(f"step {len(self.steps)}")
        self.settling = True


def _larger(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else max(a, b)


def busy_share(loop: Loop) -> float | None:
    """This rank's busy share, in a pass of its own after everything that is timed."""
    train_state = loop.job.train_state
    assert train_state is not None
    if not train_state.compute:
        return None
    index = loop.job.cell.total_steps
    return busy_fraction(
        lambda: (loop.step(loop.fetch(index)), None)[1], train_state.compute, loop.synchronize
    )
