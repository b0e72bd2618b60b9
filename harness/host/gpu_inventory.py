"""GPUs of this host: identity, settings, and the links between them."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from harness.host.amd import TorchGpu, rocm_version, torch_gpus
from harness.host.nvml import Handle, Nvml, nvml

_CORE_WORDS = 64
"""Number of 64-bit words in NVML's sets of cores, enough for 4096 cores."""
_NODE_WORDS = 1
"""64-bit words in NVML's sets of NUMA nodes: up to 64."""


@dataclass(frozen=True)
class Gpu:
    """One device as CUDA counts it: a GPU, or a MIG slice of one."""

    index: int
    """NVML's index of the physical GPU (under ROCm, torch's); -1 if unknown."""
    uuid: str
    """`GPU-...` for a GPU, `MIG-...` for a slice."""
    name: str
    memory_bytes: int
    capability: tuple[int, int] | None
    pci_bus_id: str
    numa_node: int | None
    cores: tuple[int, ...]
    mig: bool


@functools.cache
def driver() -> tuple[str | None, tuple[int, int] | None]:
    """Returns the driver's version, and the newest CUDA version that it supports."""
    with nvml() as library:
        if library is None:
            return None, None
        number = library.number("nvmlSystemGetCudaDriverVersion_v2")  # 1000 x major + 10 x minor
        cuda = None if number is None else (number // 1000, number % 1000 // 10)
        return library.text("nvmlSystemGetDriverVersion"), cuda


def visible_gpus() -> tuple[Gpu, ...]:
    """Returns the devices that CUDA would show this process, in its order.

    Asks torch under ROCm, else parses CUDA_VISIBLE_DEVICES (CUDA C++ Programming Guide, environment
    variables): indices, assumed in PCI bus order, or UUID prefixes. Other entries end the list; a
    repeated device empties it. CUDA shows one MIG slice and no other GPU.
    """
    if rocm_version():
        return tuple(_of_torch(index, gpu) for index, gpu in enumerate(rocm_gpus()))
    return _visible(os.environ.get("CUDA_VISIBLE_DEVICES"))


_ROCM_VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def rocm_gpus() -> tuple[TorchGpu, ...]:
    """Returns the GPUs that torch for ROCm shows this process, in its order."""
    return _visible_to_rocm(tuple(map(os.environ.get, _ROCM_VISIBLE)))


@functools.cache
def _visible_to_rocm(variables: tuple[str | None, ...]) -> tuple[TorchGpu, ...]:
    """Returns the GPUs that torch for ROCm shows. Cached, because asking torch takes seconds."""
    return torch_gpus()


def _of_torch(index: int, gpu: TorchGpu) -> Gpu:
    return Gpu(
        index=index,
        uuid=gpu.uuid,
        name=gpu.name,
        memory_bytes=gpu.memory_bytes,
        capability=None,
        pci_bus_id=gpu.pci_bus_id,
        numa_node=None,
        cores=(),
        mig=False,
    )


def nearby_cores(position: int) -> tuple[int, ...]:
    """Returns the cores near the visible GPU of this number; empty if unknown."""
    devices = visible_gpus()
    return devices[position].cores if 0 <= position < len(devices) else ()


@functools.cache
def _visible(variable: str | None) -> tuple[Gpu, ...]:
    """Cached, because starting NVML may take seconds."""
    with nvml() as library:
        if library is None:
            return ()
        handles = {
            number: library.handle("nvmlDeviceGetHandleByIndex", number)
            for number in range(library.number("nvmlDeviceGetCount") or 0)
        }
        physical = {number: gpu for number, gpu in handles.items() if gpu is not None}
        slices = {number: _slices(library, gpu) for number, gpu in physical.items()}
        if variable is not None and variable.startswith("MIG-"):
            all_slices = [handle for of_gpu in slices.values() for handle in of_gpu]
            chosen = _named_slice(library, variable.split(",")[0], all_slices)
            return () if chosen is None else _identities(library, [chosen])
        numbers = list(physical)
        if variable is not None:
            uuids = [_uuid(library, gpu) for gpu in physical.values()]
            numbers = [numbers[index] for index in _indices(variable, uuids)]
        first_slice = next((slices[number][0] for number in numbers if slices[number]), None)
        if first_slice is not None:
            return _identities(library, [first_slice])
        gpus = [physical[number] for number in numbers]
        return _identities(library, [gpu for gpu in gpus if not library.is_divided(gpu)])


def _uuid(library: Nvml, handle: Handle) -> str:
    return library.text("nvmlDeviceGetUUID", handle) or ""


def _slices(library: Nvml, gpu: Handle) -> list[Handle]:
    if not library.is_divided(gpu):
        return []
    most = library.number("nvmlDeviceGetMaxMigDeviceCount", gpu) or 0
    ask = functools.partial(library.handle, "nvmlDeviceGetMigDeviceHandleByIndex", gpu)
    return [handle for number in range(most) if (handle := ask(number)) is not None]


def _named_slice(library: Nvml, name: str, slices: Sequence[Handle]) -> Handle | None:
    exact = library.handle("nvmlDeviceGetHandleByUUID", name)
    if exact is not None:
        return exact
    matching = [handle for handle in slices if _uuid(library, handle).startswith(name)]
    return matching[0] if len(matching) == 1 else None


def _indices(variable: str, uuids: Sequence[str]) -> list[int]:
    chosen: list[int] = []
    by_uuid = variable.startswith("GPU-")
    for word in variable.split(","):
        digits = re.match(r"[+-]?\d+", word.strip(), re.ASCII)
        index = int(digits[0]) if digits else -1
        if by_uuid:
            matching = [i for i, uuid in enumerate(uuids) if uuid.startswith(word)]
            index = matching[0] if len(matching) == 1 else -1
        if index in chosen:
            return []
        if index < 0 or (by_uuid and not word.startswith("GPU-")):
            break
        chosen.append(index)
    return chosen[: next((i for i, index in enumerate(chosen) if index >= len(uuids)), None)]


def _identities(library: Nvml, handles: Sequence[Handle]) -> tuple[Gpu, ...]:
    devices = [_identity(library, handle) for handle in handles]
    return tuple(device for device in devices if device is not None)


def _identity(library: Nvml, handle: Handle) -> Gpu | None:
    physical, mig = library.whole_gpu(handle)
    name, memory = library.text("nvmlDeviceGetName", handle), library.memory(handle)
    if name is None or memory is None:
        return None
    index = library.number("nvmlDeviceGetIndex", physical)
    scope = library.constant("NVML_AFFINITY_SCOPE_NODE")
    nodes = library.members("nvmlDeviceGetMemoryAffinity", physical, _NODE_WORDS, scope)
    return Gpu(
        index=-1 if index is None else index,
        uuid=_uuid(library, handle),
        name=name,
        memory_bytes=memory[0],
        capability=library.pair("nvmlDeviceGetCudaComputeCapability", physical),
        pci_bus_id=library.bus_id("nvmlDeviceGetPciInfo", physical) or "",
        numa_node=nodes[0] if len(nodes) == 1 else None,
        cores=library.members("nvmlDeviceGetCpuAffinity", physical, _CORE_WORDS),
        mig=mig,
    )


_ANCESTORS = {
    "INTERNAL": "one board",
    "SINGLE": "single PCIe switch",
    "MULTIPLE": "several PCIe switches",
    "HOSTBRIDGE": "host bridge",
    "NODE": "NUMA node",
    "SYSTEM": "system",
}
"""Closest common PCI level of two GPUs, by NVML_TOPOLOGY_*."""
_NVLINK_VERSIONS = dict(
    enumerate(("1.0", "2.0", "2.2", "3.0", "3.1", "4.0", "5.0", "6.0"), start=1)
)
"""NVLink versions by NVML_NVLINK_VERSION_*, some of which older pynvml releases lack."""


@dataclass(frozen=True)
class GpuFacts(Gpu):
    """Identity and settings of a GPU. Values that it does not report are None."""

    ecc: bool | None = None
    persistence: bool | None = None
    """Whether the driver stays loaded while no process uses the GPU."""
    power_limit_watts: float | None = None
    default_power_limit_watts: float | None = None


def gpu_facts() -> list[GpuFacts]:
    if rocm_version():
        return [GpuFacts(**vars(device)) for device in visible_gpus()]
    with nvml() as library:
        if library is None:
            return []
        return [_facts(library, device) for device in visible_gpus()]


def _physical_gpu(library: Nvml, device: Gpu) -> Handle | None:
    return library.handle("nvmlDeviceGetHandleByIndex", device.index)


def _facts(library: Nvml, device: Gpu) -> GpuFacts:
    gpu = _physical_gpu(library, device)
    ecc = library.pair("nvmlDeviceGetEccMode", gpu)
    persistence = library.number("nvmlDeviceGetPersistenceMode", gpu)
    return GpuFacts(
        **vars(device),
        ecc=None if ecc is None else bool(ecc[0]),
        persistence=None if persistence is None else bool(persistence),
        power_limit_watts=library.thousandths("nvmlDeviceGetEnforcedPowerLimit", gpu),
        default_power_limit_watts=library.thousandths(
            "nvmlDeviceGetPowerManagementDefaultLimit", gpu
        ),
    )


def gpu_topology() -> list[list[str]]:
    """Describes the link of each pair of visible GPUs: NVLink, or the closest common PCI level;
    `unknown` under ROCm."""
    devices = visible_gpus()
    if not devices:
        return []
    if rocm_version():
        return [["self" if a is b else "unknown" for b in devices] for a in devices]
    with nvml() as library:
        if library is None:
            return []
        ends = [_end(library, device) for device in devices]
        return [["self" if a is b else _between(library, a, b) for b in ends] for a in ends]


@dataclass(frozen=True)
class _End:
    gpu: Handle | None
    bus_id: str
    version: str
    to_switch: int
    to_gpus: Counter[str]


def _end(library: Nvml, device: Gpu) -> _End:
    gpu = _physical_gpu(library, device)
    version, to_switch, to_gpus = "", 0, Counter[str]()
    for link in range(library.constant("NVML_NVLINK_MAX_LINKS")):
        state = library.number("nvmlDeviceGetNvLinkState", gpu, link)
        if state != library.constant("NVML_FEATURE_ENABLED"):
            continue
        number = library.number("nvmlDeviceGetNvLinkVersion", gpu, link)
        version = "" if number is None else _NVLINK_VERSIONS.get(number, "")
        kind = library.number("nvmlDeviceGetNvLinkRemoteDeviceType", gpu, link)
        if kind == library.constant("NVML_NVLINK_DEVICE_TYPE_SWITCH"):
            to_switch += 1
        elif other := library.bus_id("nvmlDeviceGetNvLinkRemotePciInfo", gpu, link):
            to_gpus[other.upper()] += 1  # bus ids come in either case
    return _End(gpu, device.pci_bus_id.upper(), version, to_switch, to_gpus)


def _between(library: Nvml, a: _End, b: _End) -> str:
    direct, switched = a.to_gpus[b.bus_id], min(a.to_switch, b.to_switch)
    kind = f"NVLink {a.version}".strip()
    if direct:
        return f"{direct} x {kind}"
    if switched:
        return f"{switched} x {kind} through a switch"
    level = library.number("nvmlDeviceGetTopologyCommonAncestor", a.gpu, b.gpu)
    names = {library.constant(f"NVML_TOPOLOGY_{name}"): text for name, text in _ANCESTORS.items()}
    return "unknown" if level is None else names.get(level, "unknown")
