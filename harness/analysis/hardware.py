"""Hardware of a run, as it affects times."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.record.run import RunRecord

_SAME_MEMORY = 0.02
"""Relative tolerance: kernels of one machine reserve different amounts."""


@dataclass(frozen=True)
class Hardware:
    """Properties that must match for times to be comparable."""

    host: str
    cpu_model: str | None
    cpu_cores: int
    memory_bytes: int
    gpus: tuple[str, ...]
    gpu_memory_bytes: float | None
    power_limits: tuple[str, ...] | None = None
    """Text for each GPU; None if unknown, as before schema version 7."""
    ecc: tuple[str, ...] | None = None
    """Error correction of each GPU, which costs memory speed; None if unknown."""

    @classmethod
    def of(cls, run: RunRecord) -> Hardware:
        limits, ecc = _settings(run.gpu_facts)
        return cls(
            run.host,
            run.cpu_model,
            run.cpu_cores,
            run.memory_bytes,
            run.gpus,
            run.gpu_memory_bytes,
            limits,
            ecc,
        )

    def difference(self, other: Hardware, device: str) -> str:
        """Returns why times are not comparable, or empty. GPUs matter only to cells on GPUs."""
        if self.cpu_model is None and other.cpu_model is None and self.host != other.host:
            return "other hosts, whose CPU models are unknown"
        if self.cpu_model != other.cpu_model:
            return f"other CPU: {self.cpu_model or 'unknown'}, then {other.cpu_model or 'unknown'}"
        if self.cpu_cores != other.cpu_cores:
            return f"other number of CPU cores: {self.cpu_cores}, then {other.cpu_cores}"
        if _apart(self.memory_bytes, other.memory_bytes):
            return (
                f"other memory: {self.memory_bytes / 2**30:.1f} GiB, then"
                f" {other.memory_bytes / 2**30:.1f} GiB"
            )
        if device == "cpu":
            return ""
        if self.gpus != other.gpus:
            return f"other GPUs: {_gpu_words(self.gpus)}, then {_gpu_words(other.gpus)}"
        if _apart(self.gpu_memory_bytes or 0, other.gpu_memory_bytes or 0):
            return (
                f"other GPU memory: {(self.gpu_memory_bytes or 0) / 2**30:.1f} GiB, then"
                f" {(other.gpu_memory_bytes or 0) / 2**30:.1f} GiB"
            )
        if (
            None not in (self.power_limits, other.power_limits)
            and self.power_limits != other.power_limits
        ):
            return (
                f"other GPU power limit: {_gpu_words(self.power_limits)}, then"
                f" {_gpu_words(other.power_limits)}"
            )
        if None not in (self.ecc, other.ecc) and self.ecc != other.ecc:
            return (
                f"other error correction of GPU memory: {_gpu_words(self.ecc)}, then"
                f" {_gpu_words(other.ecc)}"
            )
        return ""


def _settings(facts: str | None) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Returns power limits and error correction as text; None for unknown ones."""
    gpus = json.loads(facts) if facts else []
    limits = [gpu["power_limit_watts"] for gpu in gpus]
    ecc = [gpu["ecc"] for gpu in gpus]
    return (
        tuple(f"{watts:.0f} W" for watts in limits) if gpus and None not in limits else None,
        tuple("on" if on else "off" for on in ecc) if gpus and None not in ecc else None,
    )


def _apart(size: float, other: float) -> bool:
    return abs(size - other) > _SAME_MEMORY * max(size, other)


def _gpu_words(gpus: Sequence[str] | None) -> str:
    return ", ".join(f"{count} x {name}" for name, count in Counter(gpus or ()).items()) or "none"
