"""NVML data about a rank's GPUs, read between steps."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.host.gpu_state import GpuState, GpuUse, state_of
from harness.host.nvml import Handle, Nvml

if TYPE_CHECKING:
    import torch

_LIMITERS = {
    "power": "NVML_PERF_POLICY_POWER",
    "temperature": "NVML_PERF_POLICY_THERMAL",
    "sync boost": "NVML_PERF_POLICY_SYNC_BOOST",
    "board limit": "NVML_PERF_POLICY_BOARD_LIMIT",
    "reliability": "NVML_PERF_POLICY_RELIABILITY",
}
"""Causes of throttling, and the nvmlDeviceGetViolationStatus counter of each.

NVML's newer counters are unsafe: their numbers changed between releases of its header, so a number
may select another counter.
"""


class RankGpus:
    """The GPUs that a rank drives, as NVML sees them; none for a CPU rank.

    NVML is not shut down: a rank's process ends soon.
    """

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
        """Returns each GPU's joules since its driver was loaded, by UUID; None if any is unknown.

        A slice has no counter of its own, and its GPU's counter includes the other slices. The
        second number is where the counter wraps around: 0, as these never do.
        """
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
        """Returns GPU use up to the last stretch's end; None on the CPU."""
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
            nvml_answers=self.complete,
        )

    def _own_bytes(self) -> list[tuple[int, int]] | None:
        """Returns this process's bytes on each GPU by NVML, and torch's reserved bytes.

        None if NVML does not list this process: inside a container it has another process id.
        """
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
