"""What disturbs a GPU: clocks, what holds them back, heat, power, errors, and who else is on it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from harness.host.gpu import Gpu, ask, visible_gpus

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
"""What holds the clocks back, in the order of the bits of nvmlClocksEventReasons (nvml.h)."""
_SLOWED = ("thermal slowdown by the driver", "thermal slowdown by hardware", "power brake")
"""Reasons for which a trial is marked. A power cap is none: a busy GPU runs at its power limit."""
_SLOWED_UNLESS_IDLE = "hardware slowdown"
"""Also reported while an idle GPU changes its clocks (nvml.h)."""
_THROTTLED_SHARE = 0.01
"""Share of the timed seconds held back by heat above which a trial is marked."""
_LOWERED = 0.99
"""Share of the default power limit below which the enforced one counts as lowered."""
GIB = 2**30


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU."""

    pid: int
    memory_bytes: int | None


@dataclass(frozen=True)
class GpuState:
    """What a GPU is doing. None: it does not tell (consumer cards, WSL and slices lack much)."""

    index: int
    """NVML's number of the physical GPU."""
    uuid: str
    sm_mhz: int | None = None
    sm_max_mhz: int | None = None
    memory_mhz: int | None = None
    memory_max_mhz: int | None = None
    reasons: tuple[str, ...] | None = None
    """What holds the clocks back, of REASONS."""
    temperature_celsius: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    """The one enforced now."""
    default_power_limit_watts: float | None = None
    corrected_errors: int | None = None
    """ECC errors since the driver was loaded."""
    uncorrected_errors: int | None = None
    used_bytes: int | None = None
    """Memory taken by all processes, the driver's own included."""
    processes: tuple[GpuProcess, ...] | None = None
    """All that compute on it."""

    @property
    def slowed(self) -> tuple[str, ...]:
        """Those of the reasons for which a trial is marked."""
        reasons = self.reasons or ()
        marked = [reason for reason in reasons if reason in _SLOWED]
        if not marked and _SLOWED_UNLESS_IDLE in reasons and "idle" not in reasons:
            marked = [_SLOWED_UNLESS_IDLE]
        return tuple(marked)

    def without(self, pids: Collection[int | None]) -> GpuState:
        """As if these processes were gone."""
        if self.processes is None:
            return self
        others = tuple(one for one in self.processes if one.pid not in pids)
        return replace(self, processes=others)

    @property
    def power_limit_lowered(self) -> bool:
        """Whether somebody set the power limit below its default."""
        now, default = self.power_limit_watts, self.default_power_limit_watts
        return now is not None and default is not None and now < _LOWERED * default


@dataclass(frozen=True)
class GpuUse:
    """What NVML told a rank of the GPUs that it drives: over the timed steps, and at their end."""

    uuids: tuple[str, ...] = ()
    counted_seconds: float = 0.0
    throttled_seconds: dict[str, float] | None = None
    """Of these, held back by `power`, `temperature`, ...; of the GPU that was longest.

    None: not counted.
    """
    states: tuple[GpuState, ...] = ()
    """At the end of the timed steps."""
    process_bytes: int | None = None
    """Memory of this process, on the GPU where it has most."""
    context_bytes: int | None = None
    """That without what torch's allocator had reserved then: context, communication buffers."""


def decoded(reasons: int) -> tuple[str, ...]:
    """NVML's bit mask in words; a bit that is not known by its number."""
    bits = (bit for bit in range(64) if reasons >> bit & 1)
    return tuple(REASONS[bit] if bit < len(REASONS) else f"reason {bit}" for bit in bits)


def state_of(library: Any, handle: Any, index: int, uuid: str) -> GpuState:
    """The state of one GPU, or of a slice and the GPU that it is part of."""
    parent = ask(library, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
    gpu = handle if parent is None else parent

    def number(name: str, *arguments: Any) -> int | None:
        answer = ask(library, name, gpu, *arguments)
        return None if answer is None else int(answer)

    def watts(name: str) -> float | None:
        milliwatts = number(name)
        return None if milliwatts is None else milliwatts / 1000

    def errors(kind: int) -> int | None:
        return number("nvmlDeviceGetTotalEccErrors", kind, library.NVML_VOLATILE_ECC)

    mask = number("nvmlDeviceGetCurrentClocksEventReasons")
    memory = ask(library, "nvmlDeviceGetMemoryInfo", handle)
    return GpuState(
        index=index,
        uuid=uuid,
        sm_mhz=number("nvmlDeviceGetClockInfo", library.NVML_CLOCK_SM),
        sm_max_mhz=number("nvmlDeviceGetMaxClockInfo", library.NVML_CLOCK_SM),
        memory_mhz=number("nvmlDeviceGetClockInfo", library.NVML_CLOCK_MEM),
        memory_max_mhz=number("nvmlDeviceGetMaxClockInfo", library.NVML_CLOCK_MEM),
        reasons=None if mask is None else decoded(mask),
        temperature_celsius=number("nvmlDeviceGetTemperature", library.NVML_TEMPERATURE_GPU),
        power_watts=watts("nvmlDeviceGetPowerUsage"),
        power_limit_watts=watts("nvmlDeviceGetEnforcedPowerLimit"),
        default_power_limit_watts=watts("nvmlDeviceGetPowerManagementDefaultLimit"),
        corrected_errors=errors(library.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        uncorrected_errors=errors(library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        used_bytes=None if memory is None else int(memory.used),
        processes=processes_on(library, handle),
    )


def processes_on(library: Any, handle: Any) -> tuple[GpuProcess, ...] | None:
    """The processes that compute on a GPU or slice; memory is None where the driver hides it."""
    answer = ask(library, "nvmlDeviceGetComputeRunningProcesses", handle)
    if answer is None:
        return None
    sizes = [(int(one.pid), one.usedGpuMemory) for one in answer]
    return tuple(GpuProcess(pid, None if size is None else int(size)) for pid, size in sizes)


@dataclass
class GpuLook:
    """A look at the visible GPUs before and after a trial.

    NVML stays started: without persistence mode each start of it wakes every GPU for seconds.
    """

    _library: Any = None
    _devices: tuple[Gpu, ...] = ()

    def states(self, count: int) -> tuple[GpuState, ...]:
        """Of the first so many, which are those that local ranks get."""
        if self._library is None:
            self._devices = visible_gpus()
            if not self._devices:
                return ()
            import pynvml

            pynvml.nvmlInit()
            self._library = pynvml
        looked = []
        for device in self._devices[:count]:
            handle = ask(self._library, "nvmlDeviceGetHandleByUUID", device.uuid)
            if handle is not None:
                looked.append(state_of(self._library, handle, device.index, device.uuid))
        return tuple(looked)


def as_json(states: Sequence[GpuState] | Sequence[GpuUse]) -> str | None:
    """As a record keeps them; None where there are none."""
    return json.dumps([asdict(one) for one in states]) if states else None


@dataclass(frozen=True)
class GpuFinding:
    """Something that makes a trial's times on GPUs doubtful."""

    cause: Literal["shared", "throttled"]
    words: str


@dataclass(frozen=True)
class GpuRecord:
    """What a trial's row says of its GPUs."""

    before: tuple[GpuState, ...] = ()
    after: tuple[GpuState, ...] = ()
    use: tuple[GpuUse, ...] = ()
    """By rank."""

    @classmethod
    def read(cls, before: Any, after: Any, use: Any) -> GpuRecord:
        """From the columns of a row; null, or written by nobody of us, is empty."""
        try:
            first, last = (tuple(map(_state, _list(text))) for text in (before, after))
            return cls(first, last, tuple(map(use_of, _list(use))))
        except (TypeError, ValueError, LookupError, AttributeError):
            return cls()

    def findings(self) -> list[GpuFinding]:
        """Why its times are doubtful; unknown is not held against it."""
        around = _around("just before", self.before) + _around("just after", self.after)
        return around + _during(self.use)


def _list(text: Any) -> list[Any]:
    if not isinstance(text, str):
        return []
    values = json.loads(text)
    return values if isinstance(values, list) else []


def _state(value: dict[str, Any]) -> GpuState:
    reasons, processes = value["reasons"], value["processes"]
    lists = {
        "reasons": None if reasons is None else tuple(reasons),
        "processes": None if processes is None else tuple(GpuProcess(**one) for one in processes),
    }
    return GpuState(**{**value, **lists})


def use_of(value: dict[str, Any]) -> GpuUse:
    """From its fields as JSON has them."""
    states = tuple(_state(one) for one in value["states"])
    return GpuUse(**{**value, "uuids": tuple(value["uuids"]), "states": states})


def _around(when: str, states: Iterable[GpuState]) -> list[GpuFinding]:
    """What was wrong just before or after a trial, when its own ranks were not there."""
    findings = []
    for state in states:
        if sizes := [one.memory_bytes for one in state.processes or () if one.memory_bytes]:
            who = "another process" if len(sizes) == 1 else f"{len(sizes)} other processes"
            words = f"GPU {state.index} {when}: {who} with {sum(sizes) / GIB:.1f} GiB"
            findings.append(GpuFinding("shared", words))
        if state.slowed:
            words = f"GPU {state.index} {when}: {_heat(state)}"
            findings.append(GpuFinding("throttled", words))
    return findings


def _heat(state: GpuState) -> str:
    degrees = state.temperature_celsius
    return ", ".join(state.slowed) + ("" if degrees is None else f" at {degrees} °C")


def _during(uses: Iterable[GpuUse]) -> list[GpuFinding]:
    """What held the ranks' GPUs back in the timed steps."""
    words = []
    for rank, use in enumerate(uses):
        held = use.throttled_seconds or {}
        least = _THROTTLED_SHARE * use.counted_seconds
        if held.get("temperature", 0.0) > least:
            words.append(f"rank {rank}: held back by heat for {_of(held['temperature'], use)}")
        for state in use.states:
            if state.slowed:
                words.append(f"GPU {state.index} in the timed steps: {_heat(state)}")
            capped = held.get("power", 0.0) > least or "power cap" in (state.reasons or ())
            if capped and state.power_limit_lowered:
                words.append(f"GPU {state.index}: {_limit(state)}")
    return [GpuFinding("throttled", one) for one in words]


def _limit(state: GpuState) -> str:
    now, default = state.power_limit_watts, state.default_power_limit_watts
    return f"held back by a power limit of {now:.0f} W, where {default:.0f} W is the default"


def _of(seconds: float, use: GpuUse) -> str:
    return f"{seconds:.1f} of {use.counted_seconds:.1f} timed seconds"
