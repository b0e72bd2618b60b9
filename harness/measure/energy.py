"""How much energy did the devices take?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.measure.gpu_use import RankGpus

POWERCAP = Path("/sys/class/powercap")


def package_joules(folder: Path = POWERCAP) -> dict[str, tuple[float, float]] | None:
    """Energy counter of each CPU package by RAPL and the value at which it starts again, in joules;
    None where the host has none."""
    counters = {}
    try:
        for package in sorted(folder.glob("intel-rapl:?")):
            microjoules = [
                int((package / name).read_text()) for name in ("energy_uj", "max_energy_range_uj")
            ]
            counters[package.name] = (microjoules[0] / 1e6, microjoules[1] / 1e6)
    except (OSError, ValueError):
        return None
    return counters or None


@dataclass
class Energy:
    """Joules over several stretches of steps.

    Of all GPUs that a rank drives, or, by rank 0 alone, of the host's CPU packages.
    """

    read: Callable[[], dict[str, tuple[float, float]] | None]
    joules: float | None = 0.0
    _start: dict[str, tuple[float, float]] | None = None

    @classmethod
    def of(cls, gpus: RankGpus, rank: int) -> Energy:
        if gpus.devices:
            return cls(gpus.joules)
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
        self.joules += sum(
            now[name][0] - before + (limit if now[name][0] < before else 0.0)
            for name, (before, limit) in begun.items()
        )
