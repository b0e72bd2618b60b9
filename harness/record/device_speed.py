"""Best measured rates of a device, as column `device_speed` of table `runs` keeps them."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import TypeAdapter


@dataclass(frozen=True)
class DeviceSpeed:
    """Best measured rates of one device, with nothing else running on it."""

    matmul_flops_per_second: dict[str, float]
    """By precision: `fp32` (without TF32), `bf16`, `fp16`, and `fp8` with a scale for each row; a
    precision that the device lacks is left out."""
    copy_bytes_per_second: float
    """Bytes read plus bytes written by a copy within the device's memory."""
    host_to_device_bytes_per_second: dict[str, float] = field(default_factory=dict)
    """By host memory, `pinned` or `pageable`; empty on a CPU."""
    device_to_host_bytes_per_second: dict[str, float] = field(default_factory=dict)
    """By host memory, `pinned` or `pageable`; empty on a CPU."""
    launch_seconds: float = 0.0
    """Time the host takes to enqueue one tiny kernel; on a CPU, to run one tiny operator."""


@dataclass(frozen=True)
class SpeedMeasurement:
    """Outcome of measuring a device."""

    speed: DeviceSpeed | None
    """None: it failed."""
    reason: str = ""
    """Why it failed; empty if it did not."""

    @property
    def as_json(self) -> str:
        """Text of the column."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str | None) -> SpeedMeasurement | None:
        """Reads a run's column; None if it is null or was written by another program."""
        try:
            return _adapter().validate_json(text) if text else None
        except ValueError:
            return None


@functools.cache
def _adapter() -> TypeAdapter[SpeedMeasurement]:
    from pydantic import TypeAdapter

    return TypeAdapter(SpeedMeasurement)


def matmul_rate(column: str | None, precision: str) -> float | None:
    """FLOP/s that a run's device reached in a matrix product of this precision; None: unknown."""
    measured = SpeedMeasurement.read(column)
    if measured is None or measured.speed is None:
        return None
    return measured.speed.matmul_flops_per_second.get(precision)
