"""ROCm as torch and amd-smi should describe it; never compared with a host with real AMD GPUs.

The fake replaces the module `amdsmi`, with the names, units and "N/A" values of release 7.0.2.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import pytest
import torch

from harness.host import amd, gpu_inventory
from tests.gpu.fake_nvml import forget

BUSES = ("0000:0c:00.0", "0000:22:00.0")


class _Clock(IntEnum):
    GFX = 1
    MEM = 5


class _Temperature(IntEnum):
    HOTSPOT = 1


class _Metric(IntEnum):
    CURRENT = 0


class AmdSmiException(Exception):
    pass


@dataclass
class FakeAmdSmi:
    """Two MI300X, identified by their bus ids; `lacking`: unsupported functions."""

    lacking: set[str] = field(default_factory=set)
    microjoules: float = 0.0
    processes: dict[int, int] = field(default_factory=dict)
    power_cap: int = 750_000_000
    AmdSmiException = AmdSmiException
    AmdSmiClkType = _Clock
    AmdSmiTemperatureType = _Temperature
    AmdSmiTemperatureMetric = _Metric

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name.startswith("amdsmi_") and name in object.__getattribute__(self, "lacking"):
            return functools.partial(_refuse, name)
        return found

    def amdsmi_init(self) -> None:
        pass

    def amdsmi_get_processor_handles(self) -> list[str]:
        return list(BUSES)

    def amdsmi_get_gpu_device_bdf(self, handle: str) -> str:
        return handle.upper()

    def amdsmi_get_energy_count(self, handle: str) -> dict[str, float]:
        count = int(self.microjoules / 15.3)
        return {"energy_accumulator": count, "counter_resolution": 15.3, "timestamp": 1}

    def amdsmi_get_power_info(self, handle: str) -> dict[str, object]:
        return {"current_socket_power": "N/A", "average_socket_power": 140}

    def amdsmi_get_power_cap_info(self, handle: str) -> dict[str, int]:
        return {"power_cap": self.power_cap, "default_power_cap": 750_000_000}

    def amdsmi_get_clock_info(self, handle: str, kind: _Clock) -> dict[str, object]:
        assert isinstance(kind, _Clock)
        return {"clk": 132 if kind is _Clock.GFX else "N/A", "max_clk": 2100}

    def amdsmi_get_temp_metric(self, handle: str, sensor: _Temperature, metric: _Metric) -> int:
        assert (type(sensor), type(metric)) == (_Temperature, _Metric)
        return 41

    def amdsmi_get_gpu_vram_usage(self, handle: str) -> dict[str, int]:
        return {"vram_total": 196592, "vram_used": 283}

    def amdsmi_get_gpu_process_list(self, handle: str) -> list[dict[str, object]]:
        return [
            {"pid": pid, "mem": 0, "memory_usage": {"vram_mem": size}}
            for pid, size in self.processes.items()
        ]

    def amdsmi_get_gpu_total_ecc_count(self, handle: str) -> dict[str, int]:
        return {"correctable_count": 3, "uncorrectable_count": 0}

    def amdsmi_get_gpu_driver_info(self, handle: str) -> dict[str, str]:
        return {"driver_name": "amdgpu", "driver_version": "6.14.14"}


def _refuse(name: str, *arguments: object) -> None:
    raise AmdSmiException(f"{name}: AMDSMI_STATUS_NOT_SUPPORTED")


def install(monkeypatch: pytest.MonkeyPatch, library: FakeAmdSmi | None) -> None:
    """Makes torch look like a ROCm build with two GPUs; if `library` is None, amdsmi is missing."""
    forget(monkeypatch)
    monkeypatch.setattr(torch.version, "hip", "7.0.51831")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 26, 6))
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    code = "gfx90a gfx942"
    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: code, raising=False)
    monkeypatch.setattr(amd, "amd_gpus", lambda: {"gfx942": 2})
    gpus = tuple(
        amd.TorchGpu("AMD Instinct MI300X", 196592 * 2**20, f"GPU-{number}", bus, "gfx942")
        for number, bus in enumerate(BUSES)
    )
    monkeypatch.setattr(gpu_inventory, "torch_gpus", lambda: gpus)
    monkeypatch.setitem(sys.modules, "amdsmi", library)
