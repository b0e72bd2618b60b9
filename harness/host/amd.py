"""AMD GPUs under a ROCm build of torch, which calls them `cuda`.

torch lists the GPUs; amd-smi's library, if installed, reports their power, clocks and memory.
"""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NewType

from pydantic import TypeAdapter, ValidationError

_SYS = Path("/sys")
_ASK_SECONDS = 120.0


def torch_build(runtime: str) -> str | None:
    """Returns the version of `hip` or `xpu` that the installed torch is built for, if any."""
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
    """Returns the version of HIP that torch is built for, if any."""
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
    # Followed by features, as in gfx942:sramecc+:xnack-.
    architecture = getattr(properties, "gcnArchName", "").partition(":")[0]
    address = f"{domain:04x}:{bus:02x}:{device:02x}.0"
    return TorchGpu(name, memory, f"GPU-{uuid}", address, architecture)


_ASK = """
import json, torch
from harness.host.amd import described
gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
print(json.dumps([vars(described(gpu)) for gpu in gpus]))
"""


def torch_gpus() -> tuple[TorchGpu, ...]:
    """Returns the GPUs that torch shows, in its order.

    Asks in another process, because one that has initialised HIP cannot fork ranks.
    """
    if not amd_gpus():
        return ()
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _ASK],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            timeout=_ASK_SECONDS,
            check=True,
        ).stdout
        return tuple(TypeAdapter(list[TorchGpu]).validate_json(answer))
    except (OSError, subprocess.SubprocessError, ValidationError):
        return ()


Handle = NewType("Handle", object)


class NoAmdSmi(Exception):
    """amd-smi's library does not answer; the message says why."""


class AmdSmi:
    """A started amd-smi library; methods return None for what it does not answer. `bus`: PCI bus
    id."""

    def __init__(self, amdsmi: ModuleType) -> None:
        self.amdsmi = amdsmi
        listed = self._ask("amdsmi_get_processor_handles")
        handles = listed if isinstance(listed, list) else []
        found = {self._ask("amdsmi_get_gpu_device_bdf", handle): handle for handle in handles}
        self._handles = {str(bus).lower(): Handle(handle) for bus, handle in found.items() if bus}

    @classmethod
    def start(cls) -> AmdSmi:
        """Raises NoAmdSmi with the reason."""
        try:
            import amdsmi
        except ImportError:
            raise NoAmdSmi("amd-smi's Python package `amdsmi` is not installed") from None
        except Exception as error:  # its import looks for the library and fails in many ways
            raise NoAmdSmi(f"amd-smi's library is not usable: {error}") from None
        try:
            amdsmi.amdsmi_init()
        except amdsmi.AmdSmiException as error:
            raise NoAmdSmi(f"amd-smi's library does not start: {error}") from None
        return cls(amdsmi)

    def _ask(self, function: str, *arguments: object) -> object:
        try:
            return getattr(self.amdsmi, function)(*arguments)
        except (self.amdsmi.AmdSmiException, AttributeError):  # older releases lack functions
            return None

    def knows(self, bus: str) -> bool:
        return bus.lower() in self._handles

    def answer(self, bus: str, function: str, *arguments: object) -> object:
        handle = self._handles.get(bus.lower())
        return None if handle is None else self._ask(function, handle, *arguments)

    def number(self, bus: str, function: str, field: str, *arguments: object) -> float | None:
        """Returns a number of an answer; the library writes `N/A` for unknown ones."""
        answer = self.answer(bus, function, *arguments)
        value = answer.get(field) if isinstance(answer, Mapping) else None
        return value if isinstance(value, int | float) else None

    def joules(self, bus: str) -> float | None:
        """Returns the energy in joules since the driver was loaded."""
        count = self.number(bus, "amdsmi_get_energy_count", "energy_accumulator")
        unit = self.number(bus, "amdsmi_get_energy_count", "counter_resolution")
        return None if count is None or unit is None else count * unit / 1e6

    def watts(self, bus: str) -> float | None:
        """Returns the current power (MI300) or the average (MI200)."""
        for field in ("current_socket_power", "average_socket_power"):
            if watts := self.number(bus, "amdsmi_get_power_info", field):
                return float(watts)
        return None

    def power_limits(self, bus: str) -> tuple[float | None, float | None]:
        """Returns the current and the default limit, in watts."""
        microwatts = [
            self.number(bus, "amdsmi_get_power_cap_info", field)
            for field in ("power_cap", "default_power_cap")
        ]
        now, default = (None if limit is None else limit / 1e6 for limit in microwatts)
        return now, default

    def clock(self, bus: str, kind: str, field: str) -> int | None:
        """Returns megahertz. `kind`: GFX or MEM; `field`: clk or max_clk."""
        of_kind = getattr(self.amdsmi.AmdSmiClkType, kind)
        megahertz = self.number(bus, "amdsmi_get_clock_info", field, of_kind)
        return None if megahertz is None else int(megahertz)

    def celsius(self, bus: str) -> int | None:
        """Returns the temperature at the hottest place of the chip."""
        sensor = self.amdsmi.AmdSmiTemperatureType.HOTSPOT
        now = self.amdsmi.AmdSmiTemperatureMetric.CURRENT
        degrees = self.answer(bus, "amdsmi_get_temp_metric", sensor, now)
        return int(degrees) if isinstance(degrees, int | float) else None

    def used_bytes(self, bus: str) -> int | None:
        mebibytes = self.number(bus, "amdsmi_get_gpu_vram_usage", "vram_used")
        return None if mebibytes is None else int(mebibytes) * 2**20

    def processes(self, bus: str) -> dict[int, int] | None:
        """Returns the bytes of GPU memory of each process, by its id."""
        listed = self.answer(bus, "amdsmi_get_gpu_process_list")
        if not isinstance(listed, list):
            return None
        return {int(entry["pid"]): int(entry["memory_usage"]["vram_mem"]) for entry in listed}

    def errors(self, bus: str, field: str) -> int | None:
        count = self.number(bus, "amdsmi_get_gpu_total_ecc_count", field)
        return None if count is None else int(count)

    def driver_version(self) -> str | None:
        for bus in self._handles:
            answer = self.answer(bus, "amdsmi_get_gpu_driver_info")
            if isinstance(answer, Mapping) and answer["driver_version"] != "N/A":
                return str(answer["driver_version"])
        return None
