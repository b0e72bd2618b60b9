"""What NVML tells a rank of the GPUs that it drives, read between steps."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.host.gpu import ask
from harness.host.gpu_state import GpuState, GpuUse, processes_on, state_of

if TYPE_CHECKING:
    import torch

_LIMITERS = {
    "power": "NVML_PERF_POLICY_POWER",
    "temperature": "NVML_PERF_POLICY_THERMAL",
    "sync boost": "NVML_PERF_POLICY_SYNC_BOOST",
    "board limit": "NVML_PERF_POLICY_BOARD_LIMIT",
    "reliability": "NVML_PERF_POLICY_RELIABILITY",
}
"""Counters of nvmlDeviceGetViolationStatus. NVML's newer ones by reason are asked for by numbers
that have changed between releases of its header, and would then count something else."""


class RankGpus:
    """NVML's handles of a rank's own GPUs; none for a rank on the CPU.

    NVML stays started: the process ends soon.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(device for device in devices if device.type == "cuda")
        self.library: Any = None
        self.handles: list[Any] = []
        self.uuids: list[str] = []
        self._seconds = 0.0
        self._held: list[dict[str, float]] = []
        self._begun: tuple[float, list[dict[str, float]]] | None = None
        self._states: tuple[GpuState, ...] = ()
        if self.devices:
            self._start()

    def _start(self) -> None:
        import torch

        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # no library, no driver: pynvml has a class for each
            return
        for device in self.devices:
            uuid = torch.cuda.get_device_properties(device).uuid
            for name in (f"GPU-{uuid}", f"MIG-{uuid}"):
                handle = ask(pynvml, "nvmlDeviceGetHandleByUUID", name)
                if handle is not None:
                    self.handles.append(handle)
                    self.uuids.append(name)
                    break
        self.library = pynvml
        self._held = [{} for _ in self.handles]

    @property
    def complete(self) -> bool:
        """Whether NVML knows each of the rank's GPUs."""
        return self.library is not None and len(self.handles) == len(self.devices)

    def joules(self) -> dict[str, tuple[float, float]] | None:
        """Energy of each GPU since its driver was loaded; None where one does not count.

        A slice has no counter of its own, and its GPU's counts what the other slices take.
        """
        if not self.complete:
            return None
        counters = {}
        for uuid, handle in zip(self.uuids, self.handles, strict=True):
            millijoules = ask(self.library, "nvmlDeviceGetTotalEnergyConsumption", handle)
            mig = ask(self.library, "nvmlDeviceGetMigMode", handle)
            in_slices = mig is not None and mig[0] == self.library.NVML_DEVICE_MIG_ENABLE
            if millijoules is None or in_slices:
                return None
            counters[uuid] = (millijoules / 1e3, 0.0)
        return counters

    def start(self) -> None:
        """Begins a stretch of timed steps."""
        if self.handles:
            self._begun = time.perf_counter(), [self._throttled(handle) for handle in self.handles]

    def stop(self) -> None:
        """Ends it."""
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

    def _state(self, handle: Any, uuid: str) -> GpuState:
        index = ask(self.library, "nvmlDeviceGetIndex", handle)
        return state_of(self.library, handle, -1 if index is None else int(index), uuid)

    def _throttled(self, handle: Any) -> dict[str, float]:
        """Seconds since the driver was loaded by limiter, of those that this GPU counts."""
        seconds = {}
        for limiter, name in _LIMITERS.items():
            policy = getattr(self.library, name)
            answer = ask(self.library, "nvmlDeviceGetViolationStatus", handle, policy)
            if answer is not None:
                seconds[limiter] = answer.violationTime / 1e9
        return seconds

    def use(self) -> GpuUse | None:
        """What there is to tell, after the last stretch; None on the CPU."""
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
        )

    def _own_bytes(self) -> list[tuple[int, int]] | None:
        """Of each GPU: this process's memory by NVML, and what torch's allocator has of it.

        None where NVML does not name this process: a container has process ids of its own.
        """
        import torch

        if not self.complete:
            return None
        sizes = []
        for device, handle in zip(self.devices, self.handles, strict=True):
            processes = processes_on(self.library, handle) or ()
            size = next((one.memory_bytes for one in processes if one.pid == os.getpid()), None)
            if size is None:
                return None
            sizes.append((size, torch.cuda.memory_reserved(device)))
        return sizes
