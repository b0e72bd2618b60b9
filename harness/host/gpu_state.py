"""GPU states around and during a trial, and reasons to doubt its times."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from harness.cell.yaml_text import parsed
from harness.host.gpu_inventory import Gpu, visible_gpus
from harness.host.nvml import GpuProcess, Handle, Nvml

REASONS = (
    "idle",
    "clocks set by the user",
    "power cap",
    "hardware slowdown",
    "sync boost",
    "thermal slowdown by the driver",
    "thermal slowdown by hardware",
    "power brake",
    "display clocks",
    "board limit",
    "reliability limit",
)
"""Reasons for lowered clocks, in the bit order of nvmlClocksEventReasons (nvml.h)."""
_SLOWED = ("thermal slowdown by the driver", "thermal slowdown by hardware", "power brake")
"""Reasons for which a trial is marked. A power cap is not among them, because busy GPUs run at
it."""
_SLOWED_UNLESS_IDLE = "hardware slowdown"
"""Reason that an idle GPU also reports while it changes its clocks (nvml.h)."""
_LOWERED = 0.99
"""Fraction of the default power limit below which a limit counts as lowered."""


@dataclass(frozen=True)
class GpuState:
    """State of a GPU; consumer cards, WSL and slices leave many values out."""

    index: int
    uuid: str
    sm_mhz: int | None = None
    sm_max_mhz: int | None = None
    memory_mhz: int | None = None
    memory_max_mhz: int | None = None
    reasons: tuple[str, ...] | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    default_power_limit_watts: float | None = None
    corrected_errors: int | None = None
    """Corrected ECC errors since driver load."""
    uncorrected_errors: int | None = None
    used_bytes: int | None = None
    processes: tuple[GpuProcess, ...] | None = None

    @property
    def slowed(self) -> tuple[str, ...]:
        reasons = self.reasons or ()
        marked = [reason for reason in reasons if reason in _SLOWED]
        if not marked and _SLOWED_UNLESS_IDLE in reasons and "idle" not in reasons:
            marked = [_SLOWED_UNLESS_IDLE]
        return tuple(marked)

    def without(self, pids: Collection[int | None]) -> GpuState:
        if self.processes is None:
            return self
        others = tuple(process for process in self.processes if process.pid not in pids)
        return replace(self, processes=others)

    @property
    def power_limit_lowered(self) -> bool:
        now, default = self.power_limit_watts, self.default_power_limit_watts
        return now is not None and default is not None and now < _LOWERED * default


@dataclass(frozen=True)
class GpuUse:
    """A rank's GPUs during and after the timed steps, by NVML."""

    uuids: tuple[str, ...] = ()
    counted_seconds: float = 0.0
    throttled_seconds: dict[str, float] | None = None
    """Timed seconds throttled by `power`, `temperature` etc.; maximum over the GPUs."""
    states: tuple[GpuState, ...] = ()
    process_bytes: int | None = None
    """The rank's memory on the GPU where it uses most."""
    context_bytes: int | None = None
    """`process_bytes` minus torch's reserved bytes: CUDA context and communication buffers."""
    unanswered: str = ""
    """Why energy, clocks and process memory are unknown; empty if they are known."""


def decoded(reasons: int) -> tuple[str, ...]:
    """Decodes NVML's bit mask of reasons; unknown bits become numbers."""
    bits = (bit for bit in range(64) if reasons >> bit & 1)
    return tuple(REASONS[bit] if bit < len(REASONS) else f"reason {bit}" for bit in bits)


def state_of(library: Nvml, handle: Handle, index: int, uuid: str) -> GpuState:
    """Returns the state of a GPU, or of a slice and its GPU."""
    gpu, _ = library.whole_gpu(handle)

    def number(function: str, *constants: str) -> int | None:
        return library.number(function, gpu, *map(library.constant, constants))

    def watts(function: str) -> float | None:
        return library.thousandths(function, gpu)

    def errors(kind: str) -> int | None:
        return number(
            "nvmlDeviceGetTotalEccErrors", f"NVML_MEMORY_ERROR_TYPE_{kind}", "NVML_VOLATILE_ECC"
        )

    mask = number("nvmlDeviceGetCurrentClocksEventReasons")
    memory = library.memory(handle)
    return GpuState(
        index=index,
        uuid=uuid,
        sm_mhz=number("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
        sm_max_mhz=number("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM"),
        memory_mhz=number("nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM"),
        memory_max_mhz=number("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_MEM"),
        reasons=None if mask is None else decoded(mask),
        temperature_celsius=number("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
        power_watts=watts("nvmlDeviceGetPowerUsage"),
        power_limit_watts=watts("nvmlDeviceGetEnforcedPowerLimit"),
        default_power_limit_watts=watts("nvmlDeviceGetPowerManagementDefaultLimit"),
        corrected_errors=errors("CORRECTED"),
        uncorrected_errors=errors("UNCORRECTED"),
        used_bytes=None if memory is None else memory[1],
        processes=library.processes(handle),
    )


def states_of(library: Nvml, devices: Iterable[Gpu]) -> Iterator[GpuState]:
    for device in devices:
        handle = library.handle("nvmlDeviceGetHandleByUUID", device.uuid)
        if handle is not None:
            yield state_of(library, handle, device.index, device.uuid)


@dataclass
class GpuLook:
    """Reads the visible GPUs' states around each trial. The library stays started: without
    persistence mode, each start wakes every GPU for seconds."""

    _library: Nvml | None = None
    _devices: tuple[Gpu, ...] = ()

    def states(self, count: int) -> tuple[GpuState, ...]:
        if self._library is None:
            self._devices = visible_gpus()
            self._library = Nvml.start() if self._devices else None
        if self._library is None:
            return ()
        return tuple(states_of(self._library, self._devices[:count]))


_THROTTLED_SHARE = 0.01
"""Fraction of the timed seconds throttled by heat above which a trial is marked."""
GIB = 2**30


def as_json(states: Sequence[GpuState] | Sequence[GpuUse]) -> str | None:
    return json.dumps([asdict(state) for state in states]) if states else None


@dataclass(frozen=True)
class GpuFinding:
    cause: Literal["shared", "throttled"]
    sentence: str


@dataclass(frozen=True)
class GpuRecord:
    before: tuple[GpuState, ...] = ()
    after: tuple[GpuState, ...] = ()
    use: tuple[GpuUse, ...] = ()

    @classmethod
    def read(cls, before: object, after: object, use: object) -> GpuRecord:
        """Parses a row's columns; empty if null or in another format."""
        first, last, of_ranks = (
            text if isinstance(text, str) else "[]" for text in (before, after, use)
        )
        try:
            return cls(
                parsed(tuple[GpuState, ...], first),
                parsed(tuple[GpuState, ...], last),
                parsed(tuple[GpuUse, ...], of_ranks),
            )
        except ValueError:
            return cls()

    @property
    def unanswered(self) -> list[str]:
        """Returns a sentence for each rank whose GPUs no library answered for."""
        return [
            f"rank {rank}: {use.unanswered}; energy, clocks and process memory are unknown"
            for rank, use in enumerate(self.use)
            if use.unanswered
        ]

    def findings(self) -> list[GpuFinding]:
        around = _around("just before", self.before) + _around("just after", self.after)
        return around + _during(self.use)


def _around(when: str, states: Iterable[GpuState]) -> list[GpuFinding]:
    findings = []
    for state in states:
        others = state.processes or ()
        if sizes := [process.memory_bytes for process in others if process.memory_bytes]:
            who = "another process" if len(sizes) == 1 else f"{len(sizes)} other processes"
            text = f"GPU {state.index} {when}: {who} with {sum(sizes) / GIB:.1f} GiB"
            findings.append(GpuFinding("shared", text))
        if state.slowed:
            text = f"GPU {state.index} {when}: {heat(state)}"
            findings.append(GpuFinding("throttled", text))
    return findings


def heat(state: GpuState) -> str:
    """Returns text such as `power brake at 91 °C`, without an unknown temperature."""
    degrees = state.temperature_celsius
    return ", ".join(state.slowed) + ("" if degrees is None else f" at {degrees} °C")


def _during(uses: Iterable[GpuUse]) -> list[GpuFinding]:
    reasons = []
    for rank, use in enumerate(uses):
        held = use.throttled_seconds or {}
        least = _THROTTLED_SHARE * use.counted_seconds
        if held.get("temperature", 0.0) > least:
            reasons.append(f"rank {rank}: held back by heat for {_of(held['temperature'], use)}")
        for state in use.states:
            if state.slowed:
                reasons.append(f"GPU {state.index} in the timed steps: {heat(state)}")
            capped = held.get("power", 0.0) > least or "power cap" in (state.reasons or ())
            if capped and state.power_limit_lowered:
                reasons.append(f"GPU {state.index}: {_limit(state)}")
    return [GpuFinding("throttled", text) for text in reasons]


def _limit(state: GpuState) -> str:
    now, default = state.power_limit_watts, state.default_power_limit_watts
    return f"held back by a power limit of {now:.0f} W; the default is {default:.0f} W"


def _of(seconds: float, use: GpuUse) -> str:
    return f"{seconds:.1f} of {use.counted_seconds:.1f} timed seconds"
