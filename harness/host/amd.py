"""AMD GPUs under a ROCm build of torch, which calls them `cuda`; never run on one.

torch lists the GPUs. Their energy, clocks and processes are unknown.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from harness.host.process import Ended, call_apart

_SYS = Path("/sys")
_ASK_SECONDS = 120.0


def torch_build(runtime: str) -> str | None:
    """Returns the version of `hip` or `xpu` that the installed torch is built for; None if it is
    not built for it."""
    if torch := sys.modules.get("torch"):
        found = getattr(torch.version, runtime, None)
        return str(found) if found else None
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    found = _version_facts(spec.submodule_search_locations[0]).get(runtime)
    return str(found) if found else None


@functools.cache
def _version_facts(package: str) -> dict[str, object]:
    """Reads torch/version.py alone; importing torch takes seconds."""
    file, facts = Path(package) / "version.py", dict[str, object]()
    if file.exists():
        exec(file.read_text(encoding="utf-8"), facts)
    return facts


def rocm_version() -> str | None:
    """Returns the version of HIP that torch is built for; None if it is built for none."""
    return torch_build("hip")


def runtime_name() -> str:
    """Returns which of `CUDA` and `ROCm` torch is built for."""
    return "ROCm" if rocm_version() else "CUDA"


def amd_gpus(sys: Path = _SYS) -> dict[str, int]:
    """Returns the number of AMD GPUs by instruction set, such as {"gfx942": 8}.

    Reads the driver `amdkfd`; CPUs have no SIMD units. 90402 means gfx942: major, minor and
    stepping, the last two in hexadecimal.
    """
    found: Counter[str] = Counter()
    for file in (sys / "class/kfd/kfd/topology/nodes").glob("*/properties"):
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        facts = dict(line.split()[:2] for line in lines if " " in line)
        version = int(facts.get("gfx_target_version", 0))
        if version and int(facts.get("simd_count", 0)):
            major, minor, stepping = version // 10000, version // 100 % 100, version % 100
            found[f"gfx{major}{minor:x}{stepping:x}"] += 1
    return dict(found)


@dataclass(frozen=True)
class TorchGpu:
    """A GPU as torch describes it."""

    name: str
    memory_bytes: int
    uuid: str
    pci_bus_id: str
    architecture: str = ""
    """Instruction set, such as `gfx942`; empty if unknown."""


def described(properties: object) -> TorchGpu:
    """`properties`: torch.cuda.get_device_properties()."""
    places = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    name, memory, uuid, domain, bus, device = (
        getattr(properties, field) for field in ("name", "total_memory", "uuid", *places)
    )
    # torch appends features, as in gfx942:sramecc+:xnack-.
    architecture = getattr(properties, "gcnArchName", "").partition(":")[0]
    address = f"{domain:04x}:{bus:02x}:{device:02x}.0"
    return TorchGpu(name, memory, f"GPU-{uuid}", address, architecture)


def torch_gpus() -> tuple[TorchGpu, ...]:
    """Returns the GPUs that torch shows, in its order.

    Asks in another process, because one that has initialised HIP cannot fork ranks.
    """
    answer = call_apart(_described, limit=_ASK_SECONDS) if amd_gpus() else ()
    return () if isinstance(answer, Ended) else answer


def _described() -> tuple[TorchGpu, ...]:
    import torch

    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return tuple(map(described, properties))
