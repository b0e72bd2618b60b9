from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.spec.text import plural
from harness.spec.typed_json import parsed


@dataclass(frozen=True)
class DeviceSpeed:
    matmul_flops_per_second: dict[str, float]
    """FLOP/s by precision: `fp32` (without TF32), `bf16`, `fp16`, and `fp8` (rowwise scales)."""
    copy_bytes_per_second: float
    """Bytes read plus written by a copy within the device's memory."""
    host_to_device_bytes_per_second: dict[str, float] = field(default_factory=dict)
    device_to_host_bytes_per_second: dict[str, float] = field(default_factory=dict)
    """Rates by type of host memory, `pinned` or `pageable`; empty on a CPU."""
    launch_seconds: float = 0.0
    """Time to enqueue a tiny kernel; on a CPU, to run a tiny operator."""


@dataclass(frozen=True)
class SpeedMeasurement:
    speed: DeviceSpeed | None
    """None if the measurement failed."""
    reason: str = ""

    @property
    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str | None) -> SpeedMeasurement | None:
        """Parses a run's `device_speed` column; None if it is null or invalid."""
        try:
            return parsed(cls, text) if text else None
        except ValueError:
            return None


def matmul_rate(column: str | None, precision: str) -> float | None:
    """Returns matrix-product FLOP/s; None if unknown."""
    measured = SpeedMeasurement.read(column)
    if measured is None or measured.speed is None:
        return None
    return measured.speed.matmul_flops_per_second.get(precision)


def distinct_cores(nodes: Sequence[Mapping[str, Any]]) -> int:
    """Counts cores of all nodes; a machine's shared cores count once."""
    return len({(node["machine"], core) for node in nodes for core in node["cores"]})


def shared_machine(nodes: Sequence[Mapping[str, Any]], emulation: str | None = None) -> str | None:
    """Returns a note if nodes share a machine, else None."""
    machines = {node["machine"] for node in nodes}
    if len(machines) == len(nodes):
        return None
    between = (
        f"emulated links between them ({emulation})" if emulation else "no network between them"
    )
    return f"{plural(len(nodes), 'node')} on {plural(len(machines), 'machine')}: {between}"
