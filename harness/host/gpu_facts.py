"""How a host's GPUs are set up and connected."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from harness.host.gpu import Gpu, ask, nvml, visible_gpus

_ANCESTORS = {
    "INTERNAL": "one board",
    "SINGLE": "single PCIe switch",
    "MULTIPLE": "several PCIe switches",
    "HOSTBRIDGE": "host bridge",
    "NODE": "NUMA node",
    "SYSTEM": "system",
}
"""The nearest thing that two GPUs share on the PCI bus, by NVML's NVML_TOPOLOGY_*."""
_NVLINK_VERSIONS = ("1_0", "2_0", "2_2", "3_0", "3_1", "4_0", "5_0", "6_0")


@dataclass(frozen=True)
class GpuFacts(Gpu):
    """Identity and settings of a GPU. None: it does not tell."""

    ecc: bool | None
    persistence: bool | None
    power_limit_watts: float | None
    """The one enforced."""
    default_power_limit_watts: float | None


def gpu_facts() -> list[GpuFacts]:
    """Of each visible GPU, in CUDA's order."""
    with nvml() as library:
        if library is None:
            return []
        return [_facts(library, device) for device in visible_gpus()]


def _handle(library: Any, device: Gpu) -> Any:
    """Of the physical GPU, which has the settings of its slices too."""
    return ask(library, "nvmlDeviceGetHandleByIndex", device.index)


def _facts(library: Any, device: Gpu) -> GpuFacts:
    handle = _handle(library, device)
    ecc = ask(library, "nvmlDeviceGetEccMode", handle)
    persistence = ask(library, "nvmlDeviceGetPersistenceMode", handle)
    now = ask(library, "nvmlDeviceGetEnforcedPowerLimit", handle)
    default = ask(library, "nvmlDeviceGetPowerManagementDefaultLimit", handle)
    return GpuFacts(
        **vars(device),
        ecc=None if ecc is None else bool(ecc[0]),
        persistence=None if persistence is None else bool(persistence),
        power_limit_watts=None if now is None else now / 1000,
        default_power_limit_watts=None if default is None else default / 1000,
    )


def gpu_topology() -> list[list[str]]:
    """How each pair of the visible GPUs is connected, in words.

    By NVLink, else by the nearest thing that they share on the PCI bus.
    """
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

    handle: Any
    bus: str
    version: str
    to_switch: int
    to_buses: Counter[str]
    """Links by bus id of the GPU at their end."""


def _end(library: Any, device: Gpu) -> _End:
    handle = _handle(library, device)
    names = {getattr(library, f"NVML_NVLINK_VERSION_{v}"): v for v in _NVLINK_VERSIONS}
    version, to_switch, to_buses = "", 0, Counter[str]()
    for link in range(library.NVML_NVLINK_MAX_LINKS):
        if ask(library, "nvmlDeviceGetNvLinkState", handle, link) != library.NVML_FEATURE_ENABLED:
            continue
        number = ask(library, "nvmlDeviceGetNvLinkVersion", handle, link)
        version = names.get(number, "").replace("_", ".")
        kind = ask(library, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        if kind == library.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            to_switch += 1
        elif (far := ask(library, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)) is not None:
            to_buses[_bus(far.busId)] += 1
    return _End(handle, _bus(device.pci_bus_id), version, to_switch, to_buses)


def _bus(value: str | bytes) -> str:
    """Bus ids are written with either case."""
    return (value.decode() if isinstance(value, bytes) else value).upper()


def _between(library: Any, a: _End, b: _End) -> str:
    direct, switched = a.to_buses[b.bus], min(a.to_switch, b.to_switch)
    kind = f"NVLink {a.version}".strip()
    if direct:
        return f"{direct} x {kind}"
    if switched:
        return f"{switched} x {kind} through a switch"
    level = ask(library, "nvmlDeviceGetTopologyCommonAncestor", a.handle, b.handle)
    names = {getattr(library, f"NVML_TOPOLOGY_{name}"): words for name, words in _ANCESTORS.items()}
    return names.get(level, "unknown")
