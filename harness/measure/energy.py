"""How much energy did the devices take?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

POWERCAP = Path("/sys/class/powercap")


def package_joules(folder: Path = POWERCAP) -> dict[str, tuple[float, float]] | None:
    """Energy counter of each CPU package by RAPL and the value at which it starts again, in joules; None where the host has none."""
    counters = {}
    try:
        for package in sorted(folder.glob("intel-rapl:?")):
            microjoules = [int((package / name).read_text()) for name in ("energy_uj", "max_energy_range_uj")]
            counters[package.name] = (microjoules[0] / 1e6, microjoules[1] / 1e6)
    except (OSError, ValueError):
        return None
    return counters or None


def gpu_joules(device: torch.device) -> dict[str, tuple[float, float]] | None:
    """Energy that this GPU has taken since its driver was loaded, by NVML; None where it does not count."""
    import torch

    with contextlib.suppress(Exception):  # no library, no driver, no counter: pynvml has a class for each
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return {str(device): (pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3, 0.0)}
    return None


@dataclass
class Energy:
    """Joules over several stretches of steps: of a rank's own GPU, or, by rank 0 alone, of the host's CPU packages."""

    read: Callable[[], dict[str, tuple[float, float]] | None]
    joules: float | None = 0.0
    _start: dict[str, tuple[float, float]] | None = None

    @classmethod
    def of(cls, device: torch.device, rank: int) -> Energy:
        if device.type == "cuda":
            return cls(lambda: gpu_joules(device))
        return cls(package_joules if rank == 0 else dict)

    def start(self) -> None:
        self._start = self.read()
        if self._start is None:
            self.joules = None

    def stop(self) -> None:
        if self._start is None:
            return
        begun, now, self._start = self._start, self.read(), None
        if now is None or self.joules is None:
            self.joules = None
            return
        self.joules += sum(now[name][0] - before + (limit if now[name][0] < before else 0.0) for name, (before, limit) in begun.items())
