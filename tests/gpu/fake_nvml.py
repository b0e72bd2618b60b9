"""Stand-in for the module `pynvml` on hosts with GPUs, with its names, constants and errors."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pynvml as real
import pytest

from harness.host import gpu_inventory

GIB = 2**30


@dataclass
class FakeSlice:
    """A MIG slice of a GPU."""

    uuid: str
    name: str
    memory_bytes: int
    parent: FakeGpu | None = None
    processes: list[tuple[int, int | None]] = field(default_factory=list)


@dataclass
class FakeGpu:
    """A GPU; tests may change its fields at any time."""

    uuid: str
    name: str
    memory_bytes: int
    capability: tuple[int, int]
    bus: int = 1
    numa_node: int = 0
    cores: range = range(8)
    sm_mhz: int = 1980
    sm_max_mhz: int = 1980
    memory_mhz: int = 2619
    memory_max_mhz: int = 2619
    celsius: int = 41
    milliwatts: int = 120_000
    default_limit_milliwatts: int = 700_000
    enforced_limit_milliwatts: int = 700_000
    millijoules: int = 0
    reasons: int = real.nvmlClocksEventReasonGpuIdle
    throttled_nanoseconds: dict[int, int] = field(default_factory=dict)
    """Time throttled under each of NVML's performance policies."""
    ecc: bool = True
    uncorrected_errors: int = 0
    persistent: bool = True
    processes: list[tuple[int, int | None]] = field(default_factory=list)
    """Process id and memory in bytes (or None) of each compute process."""
    links: list[str] = field(default_factory=list)
    """PCI bus id at the far end of each active NVLink."""
    link_version: int = real.NVML_NVLINK_VERSION_4_0
    far_end: int = real.NVML_NVLINK_DEVICE_TYPE_SWITCH
    slices: list[FakeSlice] | None = None
    """MIG slices; None if the GPU is not in MIG mode."""
    lacks: frozenset[str] = frozenset()
    """Functions that this GPU does not support."""

    def __post_init__(self) -> None:
        for one in self.slices or ():
            one.parent = self

    @property
    def bus_id(self) -> str:
        return f"00000000:{self.bus:02X}:00.0"


Handle = FakeGpu | FakeSlice

ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=gpu.bus_id.encode()),
    "nvmlDeviceGetCudaComputeCapability": lambda gpu: gpu.capability,
    "nvmlDeviceGetMigMode": lambda gpu: [int(gpu.slices is not None)] * 2,
    "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: 7 if gpu.slices is not None else 0,
    "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: gpu.reasons,
    "nvmlDeviceGetTemperature": lambda gpu, sensor: gpu.celsius,
    "nvmlDeviceGetPowerUsage": lambda gpu: gpu.milliwatts,
    "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: gpu.enforced_limit_milliwatts,
    "nvmlDeviceGetPowerManagementDefaultLimit": lambda gpu: gpu.default_limit_milliwatts,
    "nvmlDeviceGetEccMode": lambda gpu: [int(gpu.ecc)] * 2,
    "nvmlDeviceGetPersistenceMode": lambda gpu: int(gpu.persistent),
    "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: gpu.millijoules,
    "nvmlDeviceGetCpuAffinity": lambda gpu, words: _bits(gpu.cores, words),
    "nvmlDeviceGetMemoryAffinity": lambda gpu, words, scope: _bits([gpu.numa_node], words),
    "nvmlDeviceGetClockInfo": lambda gpu, kind: (gpu.sm_mhz, gpu.memory_mhz)[kind // 2],
    "nvmlDeviceGetMaxClockInfo": lambda gpu, kind: (gpu.sm_max_mhz, gpu.memory_max_mhz)[kind // 2],
    "nvmlDeviceGetTotalEccErrors": lambda gpu, kind, since: gpu.uncorrected_errors * kind,
}
"""Functions that only read a GPU's field. Of the constants that they take, 1 stands for clocks of
multiprocessors and for uncorrected errors, and 2 for clocks of memory."""


@dataclass
class FakeNvml:
    """A host's GPUs behind pynvml's functions; constants and errors are the real module's."""

    gpus: list[FakeGpu]
    driver: str = "580.95.05"
    cuda: int = 13000
    no_driver: bool = False
    started: int = 0
    """Number of starts without a shutdown."""

    def __getattr__(self, name: str) -> Any:
        if answer := ANSWERS.get(name):
            return lambda handle, *given: answer(self._of(handle, name), *given)
        value = getattr(real, name)
        if name.startswith("nvml") and callable(value):
            raise AttributeError(f"the stand-in for NVML has no {name}")
        return value

    def _of(self, handle: Handle, function: str) -> FakeGpu:
        """Returns a handle's GPU; raises if NVML is not started or lacks the function."""
        if not self.started:
            raise real.NVMLError(real.NVML_ERROR_UNINITIALIZED)
        if isinstance(handle, FakeSlice):
            raise real.NVMLError(real.NVML_ERROR_NOT_SUPPORTED)
        if function in handle.lacks:
            raise real.NVMLError(real.NVML_ERROR_NOT_SUPPORTED)
        return handle

    def nvmlInit(self) -> None:
        if self.no_driver:
            raise real.NVMLError(real.NVML_ERROR_LIBRARY_NOT_FOUND)
        self.started += 1

    def nvmlShutdown(self) -> None:
        if not self.started:
            raise real.NVMLError(real.NVML_ERROR_UNINITIALIZED)
        self.started -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if index >= len(self.gpus):
            raise real.NVMLError(real.NVML_ERROR_INVALID_ARGUMENT)
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Handle:
        every: list[Handle] = [
            *self.gpus,
            *(one for device in self.gpus for one in device.slices or ()),
        ]
        for one in every:
            if one.uuid == uuid:
                return one
        raise real.NVMLError(real.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetIndex(self, handle: Handle) -> int:
        wanted = self._of(handle, "nvmlDeviceGetIndex")
        return next(i for i, device in enumerate(self.gpus) if device is wanted)

    def nvmlDeviceGetUUID(self, handle: Handle) -> str:
        return handle.uuid

    def nvmlDeviceGetName(self, handle: Handle) -> str:
        return handle.name

    def nvmlDeviceGetMemoryInfo(self, handle: Handle) -> Any:
        used = sum(size or 0 for _, size in handle.processes)
        total = handle.memory_bytes
        return SimpleNamespace(total=total, used=used, free=total - used)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Handle, index: int) -> FakeSlice:
        slices = self._of(handle, "nvmlDeviceGetMigDeviceHandleByIndex").slices or []
        if index >= len(slices):
            raise real.NVMLError(real.NVML_ERROR_NOT_FOUND)
        return slices[index]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: Handle) -> FakeGpu:
        if isinstance(handle, FakeGpu) or handle.parent is None:
            raise real.NVMLError(real.NVML_ERROR_INVALID_ARGUMENT)
        return handle.parent

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Handle) -> list[Any]:
        owner = handle if isinstance(handle, FakeSlice) else self._of(handle, "processes")
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in owner.processes]

    def nvmlDeviceGetViolationStatus(self, handle: Handle, policy: int) -> Any:
        device = self._of(handle, "nvmlDeviceGetViolationStatus")
        if policy not in device.throttled_nanoseconds:
            raise real.NVMLError(real.NVML_ERROR_NOT_SUPPORTED)
        time = device.throttled_nanoseconds[policy]
        return SimpleNamespace(referenceTime=0, violationTime=time)

    def _link(self, handle: Handle, function: str, link: int) -> str:
        """Returns the bus id at the far end of an active link."""
        device = self._of(handle, function)
        if link >= len(device.links):
            raise real.NVMLError(real.NVML_ERROR_INVALID_ARGUMENT)
        return device.links[link]

    def nvmlDeviceGetNvLinkState(self, handle: Handle, link: int) -> int:
        active = bool(self._link(handle, "nvmlDeviceGetNvLinkState", link))
        return real.NVML_FEATURE_ENABLED if active else real.NVML_FEATURE_DISABLED

    def nvmlDeviceGetNvLinkVersion(self, handle: Handle, link: int) -> int:
        self._link(handle, "nvmlDeviceGetNvLinkVersion", link)
        return self._of(handle, "nvmlDeviceGetNvLinkVersion").link_version

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Handle, link: int) -> int:
        self._link(handle, "nvmlDeviceGetNvLinkRemoteDeviceType", link)
        return self._of(handle, "nvmlDeviceGetNvLinkRemoteDeviceType").far_end

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: Handle, link: int) -> Any:
        bus = self._link(handle, "nvmlDeviceGetNvLinkRemotePciInfo", link)
        return SimpleNamespace(busId=bus.lower().encode())

    def nvmlDeviceGetTopologyCommonAncestor(self, one: Handle, other: Handle) -> int:
        first, second = (self._of(handle, "topology").numa_node for handle in (one, other))
        return real.NVML_TOPOLOGY_NODE if first == second else real.NVML_TOPOLOGY_SYSTEM


def _bits(members: Sequence[int] | range, words: int) -> Any:
    """Encodes a set as NVML does, in 64-bit words; members that do not fit are dropped."""
    array = (ctypes.c_ulonglong * words)()
    for member in members:
        if member < 64 * words:
            array[member // 64] |= 1 << (member % 64)
    return array


def h100_node() -> FakeNvml:
    """Eight H100 on two sockets of 56 cores, each with 18 NVLinks to the switches."""
    names = [f"GPU-{'ab'[i // 4]}{i}000000-0000-0000-0000-00000000000{i}" for i in range(8)]
    return FakeNvml(
        [
            FakeGpu(
                uuid,
                "NVIDIA H100 80GB HBM3",
                80 * GIB - 2**20,
                (9, 0),
                bus=0x1B + 0x10 * i,
                numa_node=i // 4,
                cores=range(56 * (i // 4), 56 * (i // 4) + 56),
                links=[f"00000000:{0x05 + link % 4:02X}:00.0" for link in range(18)],
            )
            for i, uuid in enumerate(names)
        ]
    )


def rtx_4090() -> FakeNvml:
    """A desktop GPU without ECC, MIG and NVLink."""
    lacks = ("GetEccMode", "GetTotalEccErrors", "GetMigMode", "GetNvLinkState")
    device = FakeGpu(
        "GPU-49000000-0000-0000-0000-000000000000",
        "NVIDIA GeForce RTX 4090",
        24 * GIB,
        (8, 9),
        sm_mhz=2520,
        sm_max_mhz=3105,
        memory_mhz=10501,
        memory_max_mhz=10501,
        default_limit_milliwatts=450_000,
        enforced_limit_milliwatts=450_000,
        ecc=False,
        persistent=False,
        lacks=frozenset(f"nvmlDevice{name}" for name in lacks),
    )
    return FakeNvml([device])


def a100_in_slices() -> FakeNvml:
    """Two A100: the first in MIG mode with two slices, the second whole."""
    slices = [
        FakeSlice(
            f"MIG-{word}-0000-0000-0000-000000000000",
            f"NVIDIA A100-SXM4-80GB MIG {kind}",
            size * GIB,
        )
        for word, kind, size in (("aa110000", "3g.40gb", 40), ("aa220000", "1g.10gb", 10))
    ]
    plain = FakeGpu(
        "GPU-a1000000-0000-0000-0000-000000000000",
        "NVIDIA A100-SXM4-80GB",
        80 * GIB,
        (8, 0),
        sm_mhz=1410,
        sm_max_mhz=1410,
        memory_mhz=1593,
        memory_max_mhz=1593,
        default_limit_milliwatts=400_000,
        enforced_limit_milliwatts=400_000,
    )
    return FakeNvml(
        [
            replace(plain, slices=slices),
            replace(plain, uuid="GPU-a2000000-0000-0000-0000-000000000000", bus=2),
        ]
    )


def install(
    monkeypatch: pytest.MonkeyPatch,
    host: FakeNvml,
    visible: str | None = None,
) -> FakeNvml:
    """Makes `import pynvml` find this host until the test ends.

    `visible`: CUDA_VISIBLE_DEVICES; None leaves it unset.
    """
    monkeypatch.setitem(sys.modules, "pynvml", host)
    forget(monkeypatch)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return host


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the test empty caches of NVML's answers; the old ones return when it ends."""
    for name in ("_visible", "_visible_to_rocm", "driver"):
        asked = getattr(gpu_inventory, name).__wrapped__
        monkeypatch.setattr(gpu_inventory, name, functools.cache(asked))
