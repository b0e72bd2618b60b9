from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from harness.host.amd import rocm_version
from harness.host.gpu_state import GpuState, GpuUse, state_of
from harness.host.nvml import Handle, Nvml
from harness.host.process import descendants

if TYPE_CHECKING:
    import torch


WINDOW_SECONDS = 0.03
"""Length of an observation in seconds: three ticks of the kernel's clock, enough to see a busy
core."""
FRESH_SECONDS = 0.2
"""Seconds for which an idle share is reused, longer than writing a record."""


def cpu_seconds(stat: Path = Path("/proc/stat")) -> tuple[float, float] | None:
    """Returns busy and idle seconds of all cores since boot; steal time counts as busy."""
    try:
        user, nice, system, idle, iowait, irq, softirq, steal = (
            int(x) for x in stat.read_text().split("\n", 1)[0].split()[1:9]
        )
    except (OSError, ValueError):
        return None
    tick = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq + steal) / tick, (idle + iowait) / tick


def idle_share(
    sleep: Callable[[float], None] = time.sleep,
    read: Callable[[], tuple[float, float] | None] = cpu_seconds,
) -> float | None:
    """Returns the cores' idle share during the next WINDOW_SECONDS."""
    before = read()
    sleep(WINDOW_SECONDS)
    after = read()
    if before is None or after is None:
        return None
    busy, idle = after[0] - before[0], after[1] - before[1]
    return idle / (busy + idle) if busy + idle > 0 else None


@dataclass
class Idle:
    """Idle shares around each trial; the next trial reuses a recent one."""

    look: Callable[[], float | None] = idle_share
    now: Callable[[], float] = time.monotonic
    _last: tuple[float, float | None] | None = None

    def before(self) -> float | None:
        if self._last is None or self.now() - self._last[0] > FRESH_SECONDS:
            return self.after()
        return self._last[1]

    def after(self) -> float | None:
        share = self.look()
        self._last = self.now(), share
        return share


@dataclass(frozen=True)
class CpuTime:
    """Time of a rank's counted steps."""

    seconds: float = 0.0
    rank_seconds: float = 0.0
    """CPU seconds of the rank and its children, such as a compiler's workers."""
    busy: float | None = 0.0
    """CPU seconds of the whole machine; None if unknown."""

    @classmethod
    def now(cls) -> CpuTime:
        """Reads the clocks; the difference of two readings is the time between them."""
        all_cores = cpu_seconds()
        return cls(time.perf_counter(), _own_cpu_seconds(), all_cores and all_cores[0])

    def plus_since(self, begun: CpuTime) -> CpuTime:
        now = CpuTime.now()
        is_known = None not in (self.busy, begun.busy, now.busy)
        return CpuTime(
            self.seconds + now.seconds - begun.seconds,
            self.rank_seconds + now.rank_seconds - begun.rank_seconds,
            (self.busy or 0.0) + (now.busy or 0.0) - (begun.busy or 0.0) if is_known else None,
        )


def _own_cpu_seconds() -> float:
    ended = os.times()
    seconds = time.process_time() + ended.children_user + ended.children_system
    for child in descendants(os.getpid()):
        with contextlib.suppress(psutil.Error):  # it may just have ended
            times = psutil.Process(child).cpu_times()
            seconds += times.user + times.system
    return seconds


def foreign_load(ranks: Sequence[CpuTime]) -> float | None:
    """Returns the mean number of cores that other processes keep busy. `ranks`: all ranks of one
    machine."""
    if not ranks or ranks[0].busy is None or not ranks[0].seconds:
        return None
    return max(0.0, (ranks[0].busy - sum(rank.rank_seconds for rank in ranks)) / ranks[0].seconds)


_LIMITERS = {
    "power": "NVML_PERF_POLICY_POWER",
    "temperature": "NVML_PERF_POLICY_THERMAL",
    "sync boost": "NVML_PERF_POLICY_SYNC_BOOST",
    "board limit": "NVML_PERF_POLICY_BOARD_LIMIT",
    "reliability": "NVML_PERF_POLICY_RELIABILITY",
}
"""Counters of nvmlDeviceGetViolationStatus by cause.

NVML's newer counters are unsafe: their numbers changed between releases of its header.
"""


class RankGpus:
    """A rank's GPUs, read through NVML, which is never shut down."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(device for device in devices if device.type == "cuda")
        self.library: Nvml | None = None
        self.handles: list[Handle] = []
        self.uuids: list[str] = []
        self._seconds = 0.0
        self._held: list[dict[str, float]] = []
        self._begun: tuple[float, list[dict[str, float]]] | None = None
        self._states: tuple[GpuState, ...] = ()
        if self.devices:
            self._start()

    def _start(self) -> None:
        import torch

        self.library = Nvml.start()
        if self.library is None:
            return
        for device in self.devices:
            uuid = torch.cuda.get_device_properties(device).uuid
            for name in (f"GPU-{uuid}", f"MIG-{uuid}"):
                handle = self.library.handle("nvmlDeviceGetHandleByUUID", name)
                if handle is not None:
                    self.handles.append(handle)
                    self.uuids.append(name)
                    break
        self._held = [{} for _ in self.handles]

    @property
    def complete(self) -> bool:
        return self.library is not None and len(self.handles) == len(self.devices)

    def joules(self) -> dict[str, tuple[float, float]] | None:
        """Returns each GPU's joules since driver load and its wrap-around value (0 if it never
        wraps), by UUID. None if a value is unknown, as for MIG slices."""
        if self.library is None or not self.complete:
            return None
        counters = {}
        for uuid, handle in zip(self.uuids, self.handles, strict=True):
            joules = self.library.thousandths("nvmlDeviceGetTotalEnergyConsumption", handle)
            if joules is None or self.library.is_divided(handle):
                return None
            counters[uuid] = (joules, 0.0)
        return counters

    def start(self) -> None:
        if self.handles:
            self._begun = time.perf_counter(), [self._throttled(handle) for handle in self.handles]

    def stop(self) -> None:
        if self._begun is None:
            return
        (began, before), self._begun = self._begun, None
        self._seconds += time.perf_counter() - began
        for held, was, handle in zip(self._held, before, self.handles, strict=True):
            for limiter, seconds in self._throttled(handle).items():
                if limiter in was:
                    held[limiter] = held.get(limiter, 0.0) + seconds - was[limiter]
        named = zip(self.handles, self.uuids, strict=True)
        self._states = tuple(self._state(handle, uuid) for handle, uuid in named)

    def _state(self, handle: Handle, uuid: str) -> GpuState:
        assert self.library is not None
        index = self.library.number("nvmlDeviceGetIndex", handle)
        return state_of(self.library, handle, -1 if index is None else index, uuid)

    def _throttled(self, handle: Handle) -> dict[str, float]:
        assert self.library is not None
        counted = {
            limiter: self.library.violation_seconds(handle, policy)
            for limiter, policy in _LIMITERS.items()
        }
        return {limiter: seconds for limiter, seconds in counted.items() if seconds is not None}

    def use(self) -> GpuUse | None:
        """Returns GPU use in the counted steps; None on the CPU."""
        if not self.devices:
            return None
        throttled: dict[str, float] = {}
        for held in self._held:
            for limiter, seconds in held.items():
                throttled[limiter] = max(seconds, throttled.get(limiter, 0.0))
        sizes = self._own_bytes()
        return GpuUse(
            tuple(self.uuids),
            self._seconds,
            throttled or None,
            self._states,
            None if sizes is None else max(size for size, _ in sizes),
            None if sizes is None else max(size - reserved for size, reserved in sizes),
            unanswered=self._unanswered(),
        )

    def _unanswered(self) -> str:
        if self.complete:
            return ""
        return "NVML reports no AMD GPUs" if rocm_version() else "NVML did not answer"

    def _own_bytes(self) -> list[tuple[int, int]] | None:
        """Returns this process's bytes and torch's reserved bytes on each GPU; None if NVML does
        not list this process, as in some containers."""
        import torch

        if self.library is None or not self.complete:
            return None
        sizes = []
        for device, handle in zip(self.devices, self.handles, strict=True):
            processes = self.library.processes(handle) or ()
            size = next((p.memory_bytes for p in processes if p.pid == os.getpid()), None)
            if size is None:
                return None
            sizes.append((size, torch.cuda.memory_reserved(device)))
        return sizes


POWERCAP = Path("/sys/class/powercap")


def package_joules(folder: Path = POWERCAP) -> dict[str, tuple[float, float]] | None:
    """Returns the RAPL counter in joules and its wrap-around value, by package."""
    counters = {}
    try:
        for package in sorted(folder.glob("intel-rapl:?")):
            name = package / "name"
            if name.exists() and not name.read_text().startswith("package"):
                continue  # psys, the whole platform, includes the packages
            microjoules = [
                int((package / counter).read_text())
                for counter in ("energy_uj", "max_energy_range_uj")
            ]
            counters[package.name] = (microjoules[0] / 1e6, microjoules[1] / 1e6)
    except (OSError, ValueError):
        return None
    return counters or None


@dataclass
class Energy:
    """Joules in counted steps of a rank's GPUs or, for a node's first rank, its CPU packages."""

    read: Callable[[], dict[str, tuple[float, float]] | None]
    joules: float | None = 0.0
    _start: dict[str, tuple[float, float]] | None = None

    @classmethod
    def of(cls, gpus: RankGpus, first_of_node: bool) -> Energy:
        if gpus.devices:
            return cls(gpus.joules)
        return cls(package_joules if first_of_node else dict)

    def start(self) -> None:
        self._start = self.read()
        if self._start is None:
            self.joules = None

    def stop(self) -> None:
        if self._start is None:
            return
        begun, now, self._start = self._start, self.read(), None
        if now is None or self.joules is None:
            self.joules = None
            return
        self.joules += sum(
            now[name][0] - before + (limit if now[name][0] < before else 0.0)
            for name, (before, limit) in begun.items()
        )
