"""Energy use of the devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.measure.gpu_use import RankGpus

POWERCAP = Path("/sys/class/powercap")


def package_joules(folder: Path = POWERCAP) -> dict[str, tuple[float, float]] | None:
    """Returns the RAPL counter in joules and its wrap-around value, by CPU package (Intel and AMD).

    None if the host has no counters.
    """
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
    """Joules over stretches of steps, of a rank's GPUs or of the host's CPU packages.

    Rank 0 counts the packages for all ranks.
    """

    read: Callable[[], dict[str, tuple[float, float]] | None]
    """Counters by device in joules, with their wrap-around values."""
    joules: float | None = 0.0
    """Total; None if unknown."""
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
