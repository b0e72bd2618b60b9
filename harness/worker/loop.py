from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from harness.cell.cell import Cell
from harness.cell.training import REPLAYED_STEPS, Batch, TrainStep, first_replayed
from harness.measure.clock import busy_fraction, timed_step
from harness.measure.memory_kinds import retained, state_bytes
from harness.measure.peak_memory import MemoryMeter
from harness.measure.rank_traffic import (
    ExpertTokens,
    RankTraffic,
    counted,
    folder_bytes,
    routers_of,
    step_calls,
)
from harness.measure.resource_use import CpuTime, Energy, RankGpus
from harness.parity.comparison import SGD_ERROR, RunningStatistics, deviations_from, sketches
from harness.parity.reference import Deviations, Reference
from harness.parity.reference_runs import wholly_in_fp32
from harness.record.run_record import RankStep
from harness.seam.checkpoints import MOMENTS_UP_TO
from harness.seam.job import Job, TrainState
from harness.seam.recipe import decayed
from harness.seam.registry import batches_normalised, make_strategy
from harness.worker.batches import Batches, BatchRecipe
from harness.worker.compilation import compile_seconds
from harness.worker.control_process import Control
from harness.worker.rank_answer import LoadedAnswer, Offload, RankStates
from harness.worker.reporting import Heartbeat, Progress
from harness.worker.rewind import (
    AHEAD,
    FIRST_WITHIN,
    MemoryCheckpoint,
    Rewinds,
    numbers_steps,
)
from harness.worker.spec import TrialSpec, TurnClient, begins_turn
from harness.workloads import Workload


def states_of(train_state: TrainState, workload: Workload, device_type: str) -> RankStates:
    import torch
    from torch.distributed.tensor import DTensor

    def names(tensors: Iterable[object]) -> tuple[str, ...]:
        dtypes = {str(t.dtype) for t in tensors if isinstance(t, torch.Tensor)}
        return tuple(sorted(dtype.removeprefix("torch.") for dtype in dtypes))

    parameters = list(train_state.model.parameters())
    state = [
        v
        for o in train_state.optimizers
        for s in o.state.values()
        if isinstance(s, dict)
        for k, v in s.items()
        if k != "step"
    ]
    gradients = [p.grad for p in parameters if p.grad is not None]
    kinds, buffers = state_bytes(
        itertools.chain(retained(train_state), workload.retained(train_state.model)), device_type
    )
    return RankStates(
        parameter_dtypes=names(parameters),
        # zero_grad has dropped the gradients; autograd accumulates them in the parameter's dtype.
        gradient_dtypes=names(gradients) or names(p for p in parameters if p.requires_grad),
        optimizer_state_dtypes=names(state),
        held_parameters=sum(
            (p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters
        ),
        state_bytes=kinds,
        library_buffers=buffers,
    )


MOST_TIMED_STEPS = 200


class Loop:
    peak_by_device: tuple[int, ...] = ()
    """Peak bytes on each GPU of the process; empty on CPUs."""

    def __init__(
        self,
        spec: TrialSpec,
        job: Job,
        step: TrainStep,
        meter: MemoryMeter,
        control: Control | None = None,
        heartbeat: Heartbeat | None = None,
        rewinds: Rewinds | None = None,
    ) -> None:
        self.spec, self.job, self.step, self.meter = spec, job, step, meter
        self.control, self.heartbeat, self.rewinds = control, heartbeat, rewinds
        self.first_step = 0
        self.loaded: LoadedAnswer | None = None
        self.training_step = 0
        """Number of the next training step, whose batch comes next."""
        self.paused_seconds = 0.0
        """Seconds that controls took within counted steps."""
        self.progress = Progress(spec.progress if job.rank == 0 else None)
        self.steps: list[RankStep] = []
        self.peak_allocated: int | None = None
        self.peak_reserved: int | None = None
        self.peak_host: int | None = None
        self.peaks_noted = False
        """Whether the peaks are final; rewinds must not count."""
        self.deviations: list[Deviations] = []
        cell = job.cell
        self.statistics: RunningStatistics | None = None
        if spec.reference_output and job.train_state is not None:
            parts = cell.micro_batches // (1 + len(job.train_state.replicas))
            self.statistics = RunningStatistics(job.train_state.model, parts)
        self.sketched: list[tuple[dict[str, float], ...]] = []
        self.before_ahead: list[MemoryCheckpoint] = []
        """Each replica's state before a reference's last steps."""
        self.states: RankStates | None = None
        self.expert_tokens: ExpertTokens | None = {} if job.workload.mixture_path else None
        self.collectives: tuple[str, ...] = ()
        self.settling = False
        """Whether the next step is not timed, because caches are cold."""
        self.compile_seconds = 0.0
        self.timed = 0
        self.planned = spec.timed_steps or job.cell.timed_steps
        self.traffic = RankTraffic(
            over_tcp=job.device.type == "cpu"
            and job.train_state is not None
            and job.train_state.over_tcp
        )
        self.gpus = RankGpus(meter.devices)
        self.energy = Energy.of(self.gpus, job.rank == spec.ranks.start)
        self.cpu_time = CpuTime()
        self._cpu_began: CpuTime | None = None
        self._counted_from: int | None = None
        self.turn_client = TurnClient(spec.turns) if spec.turns else None
        self.slices_began: list[tuple[int, float]] = []
        share = job.layout.share(job.rank)
        size = job.cell.global_batch // job.layout.shares
        rows = slice(share * size, (share + 1) * size)
        self.batches = Batches(
            spec.data, spec.cell.seed, cell.global_batch, rows, job.device, BatchRecipe.of(cell)
        )

    def synchronize(self) -> None:
        if self.job.device.type == "cuda":
            import torch

            for device in self.job.devices:
                torch.cuda.synchronize(device)

    def fetch(self, index: int) -> Batch:
        return self.batches.fetch(self.training_step, index)

    def start_counting(self) -> None:
        self._counted_from = len(self.steps)
        self.traffic.start()
        self.gpus.start()
        self.energy.start()
        self._cpu_began = CpuTime.now()

    def stop_counting(self) -> None:
        if self._cpu_began is not None:
            self.cpu_time = self.cpu_time.plus_since(self._cpu_began)
            self._cpu_began = None
        self.energy.stop()
        self.gpus.stop()
        self.traffic.stop(0 if self._counted_from is None else len(self.steps) - self._counted_from)
        self._counted_from = None

    def per_step(self, total: float | None) -> float | None:
        return total / self.traffic.steps if total is not None and self.traffic.steps else None

    def offload(self) -> Offload | None:
        """Returns traffic and size of the offload folder; None if there is none."""
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
        """Whether the trial runs until enough steps are timed."""
        timed = self.control is not None and self.spec.timed_seconds > 0
        return self.spec.turns is not None or timed

    @property
    def next_step(self) -> int:
        return self.first_step + len(self.steps)

    def continue_at(self, step: int, loaded: LoadedAnswer) -> None:
        self.first_step = self.training_step = step
        self.loaded, self.settling = loaded, True

    def over(self) -> bool:
        """Returns whether all steps are done, and rewinds if enabled."""
        if self.rewinds and (
            not self.rewinds.enough or self.training_step < self.job.cell.parity_steps
        ):
            return False
        return self.next_step >= self.job.cell.total_steps and (
            not self.counted or self.timed >= self.planned
        )

    def save_or_rewind(self, rewinds: Rewinds) -> None:
        train_state, number = self.job.train_state, len(self.steps)
        assert train_state is not None
        if rewinds.keeps(self.training_step):
            self._without_counting(lambda: rewinds.keep(train_state, self.job.cell, number))
        elif (
            self.training_step >= self.job.cell.parity_steps
            and self._knows_what_is_left()
            and rewinds.due(number, self.planned - self.timed)
        ):
            self.note_peak()
            self.peaks_noted = True
            self._without_counting(lambda: rewinds.rewind(train_state))
            self.training_step = rewinds.from_step

    def _knows_what_is_left(self) -> bool:
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
        """Counts each expert's tokens in the last warm-up step, once per tensor-parallel group."""
        job = self.job
        counts = index == job.cell.warmup_steps - 1 and job.rank % job.layout.tensor == 0
        if self.expert_tokens is None or job.train_state is None or not counts:
            return contextlib.nullcontext()
        routers = job.train_state.routers or routers_of(job.train_state.model, job.workload)
        return counted(routers, self.expert_tokens)

    @contextlib.contextmanager
    def counting_collectives(self, index: int) -> Iterator[None]:
        """Counts the collectives of the last warm-up step, unless it is compiled."""
        train_state, cell = self.job.train_state, self.job.cell
        counts = index == cell.warmup_steps - 1 and cell.compile == "none"
        if train_state is None or not counts or self.job.layout.processes == 1:
            yield
            return
        with step_calls(train_state, self.job.layout.processes) as seen:
            yield
        self.collectives = seen.dtypes

    def take_turn(self, index: int) -> None:
        assert self.turn_client is not None
        self.stop_counting()
        last = self.steps[-1].step_seconds
        self.slices_began.append(
            (index, self.turn_client.wait(index - len(self.slices_began) - 1, last))
        )
        self.settling = True
        if self.heartbeat:
            self.heartbeat.forget()

    def run_step(self, index: int) -> None:
        if self.rewinds:
            self.save_or_rewind(self.rewinds)
        if self.spec.reference_output and self.training_step == first_replayed(
            self.job.cell.parity_steps
        ):
            assert self.job.train_state is not None
            if _replays_ahead(self.job.train_state, self.job.cell):
                self.before_ahead = _copies(self.job.train_state)
        if self.spec.turns and begins_turn(index - self.job.cell.warmup_steps):
            self.take_turn(index)
        if index == self.job.cell.warmup_steps and self.job.cell.compile != "none":
            self.compile_seconds = compile_seconds()
            self.meter.reset()  # the compiler's memory is not training memory
        if index + 1 == self.job.cell.total_steps and not (self.timed or self.counted):
            self.settling = False  # no other step could be timed
        if self._counted_from is None and index >= self.job.cell.warmup_steps and not self.settling:
            self.start_counting()
        with self.counting_tokens(index), self.counting_collectives(index):
            loss, data_seconds, step_seconds = timed_step(
                lambda: self.fetch(index), self.step, self.synchronize
            )
        warm = index < self.job.cell.warmup_steps
        phase = "warmup" if warm else "settling" if self.settling else "timed"
        self.settling = False
        self.timed += phase == "timed"
        norm, self.job.recipe.gradient_norm = self.job.recipe.gradient_norm, None
        self.steps.append(
            RankStep(
                step=index,
                phase=phase,
                data_seconds=data_seconds,
                step_seconds=step_seconds,
                loss=None if loss is None else float(loss.detach()),
                training_step=self.training_step,
                gradient_norm=None if norm is None else float(norm),
            )
        )
        self.training_step += 1
        self.progress.tell(index, step_seconds)
        if self.control:
            self._pause(self.control, phase == "timed")
        if self.heartbeat:
            self.heartbeat.beat(f"step {index + 1}", index + 1)

    def _pause(self, control: Control, timed: bool) -> None:
        """Runs a control if one is due. After the cell's timed steps, ranks agree how many steps to
        add."""
        agree = timed and self.timed == self.job.cell.timed_steps
        if not (agree or self._first_pause() or len(self.steps) % control.every == 0):
            return
        began = time.perf_counter()
        seconds = [step.step_seconds for step in self.steps if step.phase == "timed"]
        pause = control.pause(sum(seconds) / len(seconds) if agree else 0.0)
        last = self.steps[-1]
        self.steps[-1] = replace(
            last,
            step_seconds=last.step_seconds + pause.left_over_seconds,
            control_seconds=pause.control_seconds,
            left_over_seconds=pause.left_over_seconds,
        )
        if self._counted_from is not None:
            self.paused_seconds += time.perf_counter() - began
            rank_seconds = self.cpu_time.rank_seconds + pause.control_cpu_seconds
            self.cpu_time = replace(self.cpu_time, rank_seconds=rank_seconds)
        if agree and pause.largest:
            wanted = math.ceil(self.spec.timed_seconds / pause.largest)
            self.planned = max(self.planned, min(wanted, MOST_TIMED_STEPS))

    def _first_pause(self) -> bool:
        """Returns whether warm-up has ended without a pause. In the first one, controls build their
        model, which must not count as other processes' load."""
        return self.next_step == self.job.cell.warmup_steps and all(
            step.left_over_seconds is None for step in self.steps
        )

    def joules_per_step(self) -> float | None:
        """Returns energy per timed step, without the control's share of the time."""
        joules = self.per_step(self.energy.joules)
        if joules is None or not self.cpu_time.seconds:
            return joules
        return joules * (1 - self.paused_seconds / self.cpu_time.seconds)

    def note_peak(self) -> None:
        """Records the peaks since the last call, except in replays."""
        if self.peaks_noted:
            return
        peak = self.meter.peak()
        self.meter.method = peak.method
        self.peak_allocated = _larger(self.peak_allocated, peak.allocated)
        self.peak_reserved = _larger(self.peak_reserved, peak.reserved)
        self.peak_host = _larger(self.peak_host, peak.host)
        before = self.peak_by_device or peak.by_device
        self.peak_by_device = tuple(map(max, before, peak.by_device))

    def verify(self) -> None:
        """Compares or saves the parameters."""
        self.stop_counting()
        self.note_peak()
        train_state, workload, cell = self.job.train_state, self.job.workload, self.job.cell
        assert train_state is not None
        self.states = self.states or states_of(train_state, workload, self.job.device.type)
        with self.meter.unlimited():
            if self.spec.reference_output and self.statistics:
                losses = [step.loss for step in self.steps if step.loss is not None]
                norms = [s.gradient_norm for s in self.steps if s.gradient_norm is not None]
                initial = workload.build(self.job.cell.seed, self.job.device)
                Reference(self.spec.reference_output).save(
                    workload, train_state, initial, losses, norms, self.statistics.by_replicas()
                )
                self.replay_ahead(Reference(self.spec.reference_output), train_state)
            if self.spec.reference:
                reference = Reference(self.spec.reference)
                ahead = self.rewinds is not None and self.rewinds.is_ahead
                replicas = None if ahead else self._replicas()
                self.deviations.append(
                    deviations_from(
                        reference,
                        train_state,
                        workload,
                        replicas,
                        share=self.job.layout.share(self.job.rank),
                        decay=0.0 if wholly_in_fp32(cell, workload) else decayed(cell),
                        update_error=SGD_ERROR if cell.optimizer == "sgd" else 0.0,
                        ahead=ahead,
                    )
                )
        self.meter.reset()
        if self.heartbeat:
            self.heartbeat.beat(f"step {len(self.steps)}")
        self.settling = True

    def sketch(self) -> None:
        train_state = self.job.train_state
        assert train_state is not None
        with self.meter.unlimited():
            replicas = (train_state, *train_state.replicas)
            self.sketched.append(tuple(sketches(replica) for replica in replicas))

    def replay_ahead(self, reference: Reference, train_state: TrainState) -> None:
        """Replays the end of a reference's segment AHEAD, saves the result, and restores the
        state."""
        if not self.before_ahead:
            return
        after, states = _copies(train_state), (train_state, *train_state.replicas)
        for before, state in zip(self.before_ahead, states, strict=True):
            before.restore(state, AHEAD)
        steps = range(first_replayed(self.job.cell.parity_steps), self.job.cell.parity_steps)
        losses = [self.step(self.batches.fetch(step, step)) for step in steps]
        reference.save_ahead(train_state, [float(loss) for loss in losses if loss is not None])
        for copy, state in zip(after, states, strict=True):
            copy.restore(state)
        self.before_ahead = []

    def _replicas(self) -> int | None:
        """Returns the number of replicas with separate running statistics. None on ranks outside
        the first replica."""
        cell, layout = self.job.cell, self.job.layout
        if layout.share(self.job.rank):
            return None
        if not self.job.workload.batch_norm:
            return 1
        return batches_normalised(make_strategy(cell), cell, layout) // cell.micro_batches


def _replays_ahead(train_state: TrainState, cell: Cell) -> bool:
    """Returns whether a reference also replays AHEAD: if optimizer states are compared and have
    step numbers."""
    parameters = train_state.model.parameters()
    trained_bytes = sum(tensor.nbytes for tensor in parameters if tensor.requires_grad)
    return trained_bytes <= MOMENTS_UP_TO and numbers_steps(train_state, cell)


def _copies(train_state: TrainState) -> list[MemoryCheckpoint]:
    return [MemoryCheckpoint(state) for state in (train_state, *train_state.replicas)]


def _larger(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else max(a, b)


def busy_share(loop: Loop) -> float | None:
    """Returns this rank's busy share, measured in a separate pass."""
    train_state = loop.job.train_state
    assert train_state is not None
    if not train_state.compute:
        return None
    index = loop.job.cell.total_steps
    return busy_fraction(
        lambda: (loop.step(loop.fetch(index)), None)[1], train_state.compute, loop.synchronize
    )
