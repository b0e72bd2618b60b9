"""Settings of a host's GPUs and the links between them."""

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
"""Closest common level of two GPUs on the PCI bus, by NVML's NVML_TOPOLOGY_*."""
_NVLINK_VERSIONS = dict(
    enumerate(("1.0", "2.0", "2.2", "3.0", "3.1", "4.0", "5.0", "6.0"), start=1)
)
"""NVLink versions by NVML_NVLINK_VERSION_*, some of which older pynvml releases lack."""


@dataclass(frozen=True)
class GpuFacts(Gpu):
    """Identity and settings of a GPU; None if not reported."""

    ecc: bool | None
    """Whether error correction of memory is on."""
    persistence: bool | None
    """Whether the driver stays loaded while no process uses the GPU."""
    power_limit_watts: float | None
    """Enforced power limit."""
    default_power_limit_watts: float | None


def gpu_facts() -> list[GpuFacts]:
    with nvml() as library:
        if library is None:
            return []
        return [_facts(library, device) for device in visible_gpus()]


def _physical(library: Nvml, device: Gpu) -> Handle | None:
    """Returns the physical GPU, whose settings also apply to its slices."""
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
    """Describes the link between each pair of visible GPUs: NVLink, or the closest level shared on
    the PCI bus."""
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
    gpu: Handle | None
    bus_id: str
    version: str
    """NVLink version, such as `4.0`."""
    to_switch: int
    """Number of links that end at an NVSwitch."""
    to_gpus: Counter[str]
    """Number of links by the other GPU's bus id."""


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
