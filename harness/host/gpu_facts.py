"""How a host's GPUs are set up and connected."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from harness.host.gpu import Gpu, visible_gpus
from harness.host.nvml import Handle, Nvml, nvml

_ANCESTORS = {
    "INTERNAL": "one board",
    "SINGLE": "single PCIe switch",
    "MULTIPLE": "several PCIe switches",
    "HOSTBRIDGE": "host bridge",
    "NODE": "NUMA node",
    "SYSTEM": "system",
}
"""The nearest thing that two GPUs share on the PCI bus, by NVML's NVML_TOPOLOGY_*."""
_NVLINK_VERSIONS = dict(
    enumerate(("1.0", "2.0", "2.2", "3.0", "3.1", "4.0", "5.0", "6.0"), start=1)
)
"""NVLink's versions by NVML's NVML_NVLINK_VERSION_*, of which an older pynvml lacks some names."""


@dataclass(frozen=True)
class GpuFacts(Gpu):
    """Identity and settings of a GPU. None: the GPU does not say."""

    ecc: bool | None
    """Whether memory errors are corrected."""
    persistence: bool | None
    """Whether the driver stays loaded while no process uses the GPU."""
    power_limit_watts: float | None
    """The limit that is enforced."""
    default_power_limit_watts: float | None


def gpu_facts() -> list[GpuFacts]:
    """Of each visible GPU, in CUDA's order."""
    with nvml() as library:
        if library is None:
            return []
        return [_facts(library, device) for device in visible_gpus()]


def _physical(library: Nvml, device: Gpu) -> Handle | None:
    """The physical GPU, whose settings are those of its slices too."""
    return library.handle("nvmlDeviceGetHandleByIndex", device.index)


def _facts(library: Nvml, device: Gpu) -> GpuFacts:
    gpu = _physical(library, device)
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
    """How each pair of the visible GPUs is connected, in words: by NVLink, else by the nearest
    thing that they share on the PCI bus."""
    devices = visible_gpus()
    if not devices:
        return []
    with nvml() as library:
        if library is None:
            return []
        ends = [_end(library, device) for device in devices]
        return [["self" if a is b else _between(library, a, b) for b in ends] for a in ends]


@dataclass(frozen=True)
class _End:
    """A GPU and its active NVLinks."""

    gpu: Handle | None
    bus_id: str
    version: str
    """Of its NVLinks: `4.0`."""
    to_switch: int
    """Links that end at an NVSwitch."""
    to_gpus: Counter[str]
    """Links by the bus id of the GPU at their other end."""


def _end(library: Nvml, device: Gpu) -> _End:
    gpu = _physical(library, device)
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
            to_gpus[other.upper()] += 1  # bus ids are written in either case
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
