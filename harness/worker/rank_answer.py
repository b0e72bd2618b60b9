from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from harness.cell.durable import write_atomically
from harness.cell.yaml_text import parsed
from harness.host.gpu_state import GpuUse
from harness.measure.resource_use import CpuTime
from harness.parity.reference import Deviations
from harness.record.run_record import RankStep


@dataclass(frozen=True)
class Offload:
    read: float | None
    """Bytes read per step; None if unknown."""
    written: float | None
    folder_bytes: int
    """Bytes in the offload folder."""


@dataclass(frozen=True)
class CheckpointedState:
    """State that saving and loading must not change."""

    random: str
    tensors: str
    """Digest of parameters, buffers and optimizer states."""
    counters: tuple[int, ...]


@dataclass(frozen=True)
class LoadedAnswer:
    load_seconds: float | None
    """Seconds to load the checkpoint. None if the library loads it during setup."""
    state: CheckpointedState


@dataclass(frozen=True)
class RankStates:
    parameter_dtypes: tuple[str, ...]
    gradient_dtypes: tuple[str, ...]
    optimizer_state_dtypes: tuple[str, ...]
    held_parameters: int
    state_bytes: dict[str, int]
    """Bytes of distinct storages: parameters, gradients, optimizer, library, host."""
    library_buffers: dict[str, int]


@dataclass(frozen=True)
class TrainedAnswer:
    setup_seconds: float
    setup_peak_memory_bytes: int | None
    restarts: int
    cores: str
    """Cores of the rank in the kernel's notation, such as 0-7,16."""
    steps: tuple[RankStep, ...]
    time_slices: tuple[tuple[int, float], ...]
    """First step of each turn, and its start in seconds after the epoch."""
    peak_memory_bytes: int | None
    reserved_memory_bytes: int | None
    host_peak_bytes: int | None
    memory_method: str
    gpu_use: GpuUse | None
    deviations: Deviations | None
    replayed_deviations: tuple[Deviations, ...]
    replays_ahead: tuple[bool, ...]
    """Whether each replay was AHEAD (harness/worker/rewind.py)."""
    busy_fraction: float | None
    """Fraction of time in which the pipeline stage computes."""
    offload: Offload | None
    sent_bytes_per_step: float | None
    cpu_time: CpuTime
    joules_per_step: float | None
    states: RankStates
    sketches: dict[str, float] | None = None
    """Sum of each final parameter with random signs; None if ranks are not compared."""
    sketched: tuple[tuple[dict[str, float], ...], ...] = ()
    """Sketches after the steps of `TrialSpec.sketched_after`, of each replica in the process."""
    compile_seconds: float | None = None
    loaded: LoadedAnswer | None = None
    expert_tokens: dict[int, tuple[int, ...]] | None = None
    """Tokens per expert in a warm-up step, by block; empty if another rank counts them."""
    collectives: tuple[str, ...] = ()
    """Collectives of a warm-up step with their dtypes; empty if they are unknown."""
    peak_by_device: tuple[int, ...] = ()
    """Peak bytes on each GPU of the process; empty on CPUs."""

    @property
    def peaks(self) -> tuple[int | None, ...]:
        """Peak bytes on each device of the process."""
        return self.peak_by_device or (self.peak_memory_bytes,)


@dataclass(frozen=True)
class SavedAnswer:
    steps: tuple[RankStep, ...]
    save_seconds: float
    blocked_seconds: float
    """Part of `save_seconds` in which the rank could not train."""
    state: CheckpointedState


@dataclass(frozen=True)
class ProfiledAnswer:
    plain_seconds: tuple[float, ...]
    profiled: tuple[dict[str, float | None], ...]
    """Seconds of each profiled step by component, plus `overlapped`, `operators` and `step`."""
    calls: tuple[tuple[str, int, int, int], ...] | None
    """Collectives as (operation, bytes, group size, count). None if torch does not see them."""
    sent_bytes_per_step: float | None
    wire: str
    """How the backend moves bytes (harness/measure/rank_traffic.py)."""
    memory: dict[str, int] | None
    unseen_buffers: dict[str, int] | None
    memory_reason: str
    private_bytes: int | None
    """Peak bytes of the tracked step, measured as in trials."""


@dataclass(frozen=True)
class FailureAnswer:
    status: str
    """`failed` or `out_of_memory`."""
    reason: str
    failed_at: float
    consequence: bool
    """Whether another rank failed first."""
    failed_in: str | None = None
    holding: Mapping[str, object] | None = None
    """Bytes held when memory ran out (harness/measure/memory_kinds.py)."""


@dataclass(frozen=True)
class RankAnswer:
    """Result of a rank. All parts are None if it ended silently."""

    rank: int
    pid: int | None = None
    entered_at: float | None = None
    """Time at which it had imported torch, in seconds after the epoch."""
    trained: TrainedAnswer | None = None
    profiled: ProfiledAnswer | None = None
    saved: SavedAnswer | None = None
    failure: FailureAnswer | None = None
    machine: str | None = None
    node: int | None = None

    @property
    def succeeded(self) -> bool:
        return any(part is not None for part in (self.trained, self.profiled, self.saved))

    @property
    def silent(self) -> bool:
        return not self.succeeded and self.failure is None

    def on_node(self, node: int, machine: str, shift: float) -> RankAnswer:
        """Returns the answer as from another node, with times shifted by `shift` seconds."""
        entered_at = None if self.entered_at is None else self.entered_at + shift
        failure = self.failure and replace(self.failure, failed_at=self.failure.failed_at + shift)
        return replace(self, node=node, machine=machine, entered_at=entered_at, failure=failure)

    def write(self, scratch: str | Path) -> None:
        file = answer_file(scratch, self.rank)
        write_atomically(file, json.dumps(asdict(self)), lasting=False)

    @classmethod
    def read(cls, scratch: str | Path, rank: int) -> RankAnswer | None:
        file = answer_file(scratch, rank)
        return parsed(cls, file.read_text()) if file.exists() else None


def answer_file(scratch: str | Path, rank: int) -> Path:
    return Path(scratch) / f"rank{rank}.json"
