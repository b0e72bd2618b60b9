"""What a rank answers when it is done: a JSON file in the trial's folder, written and read here."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.host.gpu_state import GpuUse
from harness.measure.clock import StepTime

if TYPE_CHECKING:
    from pydantic import TypeAdapter


@dataclass(frozen=True)
class RankStep(StepTime):
    """A step of this rank."""

    step: int
    """From 0."""
    phase: str
    """warmup, settling or timed, as in table `steps`."""
    loss: float | None
    """Mean loss of this rank's samples; None where it has none."""
    control_seconds: float | None = None
    """Of the control that ran after the step; None: none did."""
    left_over_seconds: float | None = None
    """Processor time that this rank's threads used in the pause after the step, for work that the
    step left behind; it is part of `step_seconds`."""
    training_step: int | None = None
    """Which step of the training it is, from 0: less than `step` once the state was set back."""


@dataclass(frozen=True)
class CpuTime:
    """CPU seconds over all stretches of timed steps together."""

    seconds: float
    """Length of these stretches."""
    own: float
    """Of this rank's process."""
    busy: float | None
    """Of the whole machine; None where unknown."""


@dataclass(frozen=True)
class Offload:
    """What a rank read from and wrote to block devices in a timed step, and the size of the files
    in the offload folder, in bytes."""

    read: float | None
    written: float | None
    kept: int


@dataclass(frozen=True)
class RankStates:
    """What a rank holds between two steps."""

    parameter_dtypes: tuple[str, ...]
    gradient_dtypes: tuple[str, ...]
    optimizer_state_dtypes: tuple[str, ...]
    held_parameters: int
    """Elements."""
    state_bytes: dict[str, int]
    """Bytes of distinct storages: parameters, gradients, optimizer, library, host."""
    library_buffers: dict[str, int]
    """Bytes of the library's buffers by name."""


@dataclass(frozen=True)
class TrainedAnswer:
    """What a rank measured that trained all its steps."""

    setup_seconds: float
    setup_peak_memory_bytes: int | None
    restarts: int
    cores: str
    """That it was pinned to, as 0-7,16."""
    steps: tuple[RankStep, ...]
    time_slices: tuple[tuple[int, float], ...]
    """First step of each slice, and when that began, in seconds after the epoch."""
    peak_memory_bytes: int | None
    reserved_memory_bytes: int | None
    host_peak_bytes: int | None
    memory_method: str
    gpu_use: GpuUse | None
    """None: it drives no GPU."""
    update_deviations: dict[str, float] | None
    """By tensor, from the reference run's; None: not compared."""
    replayed_deviations: tuple[dict[str, float], ...]
    """The same each time after the state was set back."""
    busy_fraction: float | None
    """Share of time that its pipeline stage computes; None: not looked at."""
    offload: Offload | None
    """None: nothing lies on a disk."""
    sent_bytes_per_step: float | None
    cpu_time: CpuTime
    joules_per_step: float | None
    states: RankStates
    compile_seconds: float | None = None
    """That torch.compile took before the timed steps; None: nothing is compiled."""
    expert_tokens: dict[int, tuple[int, ...]] | None = None
    """By number of the block, those that each expert got from this rank's samples in the last
    warm-up step; none where another rank counts the same samples. None: there are no experts."""


@dataclass(frozen=True)
class ProfiledAnswer:
    """What a rank saw whose steps were profiled."""

    plain_seconds: tuple[float, ...]
    """Of steps without a profiler."""
    profiled: tuple[dict[str, float | None], ...]
    """Of each profiled step: seconds of its components, of `overlapped` and `operators`, and
    `step`, its time by the clock."""
    calls: tuple[tuple[str, int, int, int], ...] | None
    """Collectives of a step: operation, bytes, group size, count; None: they cannot be seen."""
    sent_bytes_per_step: float | None
    wire: str
    """How the backend moves the bytes of a collective (see harness/measure/collectives.py)."""
    memory: dict[str, int] | None
    """Bytes by kind when they are most, and `peak`, their sum; None: see `memory_reason`."""
    unseen_buffers: dict[str, int] | None
    """Bytes by name of buffers that live in C++."""
    memory_reason: str
    """Why there is no split of the peak; empty where there is one."""
    private_bytes: int | None
    """Peak memory in that step as trials measure it."""


@dataclass(frozen=True)
class FailureAnswer:
    """Why a rank ended before its steps were done."""

    status: str
    """failed or out_of_memory."""
    reason: str
    failed_at: float
    """Seconds after the epoch."""
    consequence: bool
    """Whether it only lost another rank, which failed first."""
    failed_in: str | None = None
    """Of a rank that ran out of memory: what it was doing."""
    holding: Mapping[str, object] | None = None
    """Bytes that it held then (see harness/measure/oom.py)."""


@dataclass(frozen=True)
class RankAnswer:
    """What is known of a rank at its trial's end. At most one of the three parts is there; none of
    them: it left without a word."""

    rank: int
    pid: int | None = None
    entered_at: float | None = None
    """When it ran its first instruction, in seconds after the epoch."""
    trained: TrainedAnswer | None = None
    profiled: ProfiledAnswer | None = None
    failure: FailureAnswer | None = None
    machine: str | None = None
    """Of a rank on another node: the machine that this node is on."""
    node: int | None = None
    """Of a rank on another node: which of the cell's nodes it is."""

    @property
    def succeeded(self) -> bool:
        return self.trained is not None or self.profiled is not None

    @property
    def silent(self) -> bool:
        """Whether it left without a word."""
        return not self.succeeded and self.failure is None

    def on_node(self, node: int, machine: str, shift: float) -> RankAnswer:
        """The answer of a rank on another node, its times shifted by so many seconds."""
        entered_at = None if self.entered_at is None else self.entered_at + shift
        failure = self.failure and replace(self.failure, failed_at=self.failure.failed_at + shift)
        return replace(self, node=node, machine=machine, entered_at=entered_at, failure=failure)

    def write(self, scratch: str | Path) -> None:
        """Leaves the answer in the trial's folder, complete or not at all."""
        file = answer_file(scratch, self.rank)
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(file)

    @classmethod
    def read(cls, scratch: str | Path, rank: int) -> RankAnswer | None:
        """The answer that a rank left in the trial's folder; None where there is none."""
        file = answer_file(scratch, rank)
        return _adapter().validate_python(json.loads(file.read_text())) if file.exists() else None


def answer_file(scratch: str | Path, rank: int) -> Path:
    return Path(scratch) / f"rank{rank}.json"


@functools.cache
def _adapter() -> TypeAdapter[RankAnswer]:
    from pydantic import TypeAdapter

    return TypeAdapter(RankAnswer)
