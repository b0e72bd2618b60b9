"""Rates that a trial's arithmetic is compared with."""

from __future__ import annotations

from dataclasses import dataclass

from harness.host.environment import gpus
from harness.host.gpu_models import peak_flops_per_second
from harness.record.device_speed import matmul_rate
from harness.spec.cell import Cell
from harness.workloads.workload import Workload
from harness.workloads.workload_variants import FLOAT8


@dataclass(frozen=True)
class Peaks:
    """FLOP/s of one device in a cell's precision; None: unknown."""

    datasheet: float | None = None
    matmul: float | None = None
    """Rate that this device reached in a large matrix product."""


def peaks_of(cell: Cell, workload: Workload, device_speed: str | None) -> Peaks:
    """Returns the rates of this host's devices for a cell. `device_speed`: the run's column."""
    if cell.device != "cuda":
        return Peaks()
    precision = workload.arithmetic or cell.precision
    name = gpus()[0][0] if gpus() else None
    measured = "fp8" if FLOAT8 in workload.suffixes else precision
    return Peaks(peak_flops_per_second(name, precision), matmul_rate(device_speed, measured))
