"""Which GPUs may this process use, and where are they?

Only NVML is asked, never CUDA: a process that has initialised CUDA cannot fork ranks any more.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_WORDS = 64
"""Words of 64 bits that NVML gets to write a set of CPU cores into: 4096 cores."""
_NODE_WORDS = 1
"""The same for NUMA nodes."""


@dataclass(frozen=True)
class Gpu:
    """One device as CUDA would count it: a GPU, or a MIG slice of one."""

    index: int
    """NVML's number of the physical GPU, in the order of the PCI bus."""
    uuid: str
    """`GPU-...`, of a slice `MIG-...`."""
    name: str
    memory_bytes: int
    capability: tuple[int, int] | None
    """CUDA compute capability."""
    pci_bus_id: str
    numa_node: int | None
    cores: tuple[int, ...]
    """CPU cores near it; empty: unknown."""
    mig: bool
    """Whether this is a MIG slice."""


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """NVML between its start and its end; None where the host has no library or no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, no driver, another version of it: pynvml has a class for each
        yield None
        return
    try:
        yield pynvml
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def ask(library: Any, name: str, *arguments: Any) -> Any:
    """What NVML's function `name` answers; None where GPU, driver or permissions do not let it."""
    try:
        return getattr(library, name)(*arguments)
    except library.NVMLError:
        return None


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver of this host; None: there is none, or it does not tell."""

    version: str | None
    cuda: tuple[int, int] | None
    """Newest version of CUDA that it runs."""


@functools.cache
def driver() -> Driver:
    """What NVML says of the driver."""
    with nvml() as library:
        if library is None:
            return Driver(None, None)
        version = ask(library, "nvmlSystemGetDriverVersion")
        number = ask(library, "nvmlSystemGetCudaDriverVersion_v2")  # 1000 x major + 10 x minor
        cuda = None if number is None else (number // 1000, number % 1000 // 10)
        return Driver(None if version is None else str(version), cuda)


def visible_gpus() -> tuple[Gpu, ...]:
    """The devices that CUDA would show this process, in its order; never an exception.

    CUDA_VISIBLE_DEVICES is read as in the CUDA C++ Programming Guide (appendix on environment
    variables) and in torch.cuda.device_count(): numbers or beginnings of UUIDs; what is no such
    thing, or out of range, ends the list, and a device named twice empties it. Of MIG slices CUDA
    shows a process one, and then no other GPU. Numbers follow the PCI bus; on a host with GPUs of
    several kinds CUDA counts like that only under CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    return _visible(os.environ.get("CUDA_VISIBLE_DEVICES"))


def nearby_cores(position: int) -> tuple[int, ...]:
    """CPU cores near this one of the visible GPUs, counted from 0; empty where that is unknown."""
    devices = visible_gpus()
    return devices[position].cores if 0 <= position < len(devices) else ()


@functools.cache
def _visible(variable: str | None) -> tuple[Gpu, ...]:
    """Kept: without persistence mode each start of NVML wakes every GPU, which takes seconds."""
    with nvml() as library:
        if library is None:
            return ()
        physical = _physical(library)
        slices = {number: _slices(library, handle) for number, handle in physical.items()}
        if variable is not None and variable.startswith("MIG-"):
            every = [one for own in slices.values() for one in own]
            chosen = _named_slice(library, variable.split(",")[0], every)
            return () if chosen is None else _identities(library, [chosen])
        numbers = list(physical)
        if variable is not None:
            uuids = [_uuid(library, handle) for handle in physical.values()]
            numbers = [numbers[place] for place in _places(variable, uuids)]
        sliced = next((slices[number][0] for number in numbers if slices[number]), None)
        if sliced is not None:
            return _identities(library, [sliced])
        handles = [physical[number] for number in numbers]
        return _identities(library, [one for one in handles if not _in_slices(library, one)])


def _physical(library: Any) -> dict[int, Any]:
    """Handles of the GPUs that this process may open, by NVML's number."""
    count = ask(library, "nvmlDeviceGetCount") or 0
    handles = {i: ask(library, "nvmlDeviceGetHandleByIndex", i) for i in range(count)}
    return {number: handle for number, handle in handles.items() if handle is not None}


def _uuid(library: Any, handle: Any) -> str:
    return str(ask(library, "nvmlDeviceGetUUID", handle) or "")


def _in_slices(library: Any, handle: Any) -> bool:
    """Whether a GPU is in MIG mode, in which only its slices can be used."""
    mode = ask(library, "nvmlDeviceGetMigMode", handle)
    return mode is not None and int(mode[0]) == library.NVML_DEVICE_MIG_ENABLE


def _slices(library: Any, handle: Any) -> list[Any]:
    """Handles of a GPU's MIG slices; their numbers may have gaps."""
    if not _in_slices(library, handle):
        return []
    most = ask(library, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0
    slices = [ask(library, "nvmlDeviceGetMigDeviceHandleByIndex", handle, i) for i in range(most)]
    return [one for one in slices if one is not None]


def _named_slice(library: Any, name: str, slices: Sequence[Any]) -> Any:
    """The slice of this UUID, or of the only one that begins so; None where there is none."""
    exact = ask(library, "nvmlDeviceGetHandleByUUID", name)
    if exact is not None:
        return exact
    matching = [one for one in slices if _uuid(library, one).startswith(name)]
    return matching[0] if len(matching) == 1 else None


def _places(variable: str, uuids: Sequence[str]) -> list[int]:
    """Places in `uuids` that a list of numbers or beginnings of UUIDs names."""
    chosen: list[int] = []
    by_uuid = variable.startswith("GPU-")
    for word in variable.split(","):
        place = _of_uuid(word, uuids) if by_uuid else _leading_number(word)
        if place in chosen:
            return []
        if place < 0 or (by_uuid and not word.startswith("GPU-")):
            break
        chosen.append(place)
    return chosen[: next((i for i, place in enumerate(chosen) if place >= len(uuids)), None)]


def _of_uuid(word: str, uuids: Sequence[str]) -> int:
    """Place of the only UUID that begins so; -1 where there is none, or more."""
    matching = [place for place, uuid in enumerate(uuids) if uuid.startswith(word)]
    return matching[0] if len(matching) == 1 else -1


def _leading_number(word: str) -> int:
    """The number that a word begins with, as C's strtoul reads it; -1 where it begins with none."""
    digits = re.match(r"[+-]?\d+", word.strip(), re.ASCII)
    return int(digits[0]) if digits else -1


def _identities(library: Any, handles: Sequence[Any]) -> tuple[Gpu, ...]:
    devices = [_identity(library, handle) for handle in handles]
    return tuple(device for device in devices if device is not None)


def _identity(library: Any, handle: Any) -> Gpu | None:
    """What never changes of a device; None where it does not even answer its name or memory.

    Such a GPU has fallen off the bus.
    """
    parent = ask(library, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)  # slices
    physical = handle if parent is None else parent
    name, memory = (
        ask(library, "nvmlDeviceGetName", handle),
        ask(library, "nvmlDeviceGetMemoryInfo", handle),
    )
    if name is None or memory is None:
        return None
    pci = ask(library, "nvmlDeviceGetPciInfo", physical)
    index = ask(library, "nvmlDeviceGetIndex", physical)
    capability = ask(library, "nvmlDeviceGetCudaComputeCapability", physical)
    nodes = _members(
        ask(
            library,
            "nvmlDeviceGetMemoryAffinity",
            physical,
            _NODE_WORDS,
            library.NVML_AFFINITY_SCOPE_NODE,
        )
    )
    return Gpu(
        index=-1 if index is None else int(index),
        uuid=_uuid(library, handle),
        name=str(name),
        memory_bytes=int(memory.total),
        capability=None if capability is None else (int(capability[0]), int(capability[1])),
        pci_bus_id="" if pci is None else _text(pci.busId),
        numa_node=nodes[0] if len(nodes) == 1 else None,
        cores=_members(ask(library, "nvmlDeviceGetCpuAffinity", physical, _WORDS)),
        mig=parent is not None,
    )


def _members(words: Sequence[int] | None) -> tuple[int, ...]:
    """Numbers of the bits that are set, lowest word first."""
    if words is None:
        return ()
    return tuple(i for i in range(64 * len(words)) if int(words[i // 64]) >> i % 64 & 1)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
