"""Scaling efficiency: throughput over that of one device times the number of devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.cell_result import CellResult
from harness.analysis.setting import SCALED, batch, series, setting
from harness.analysis.stats import CONFIDENCE, efficiency, ratio
from harness.spec.cell import BASELINE


def with_efficiencies(cells: Sequence[CellResult]) -> list[CellResult]:
    """Returns the same cells with scaling efficiencies. Weak scaling compares at equal batch per
    device."""
    own: dict[tuple[object, ...], CellResult] = {}
    single: dict[tuple[object, ...], CellResult] = {}
    for cell in cells:
        if cell.ranked and cell.devices == 1 and cell.samples_per_second is not None:
            key = (cell.run_id, *setting(cell, SCALED), cell.global_batch)
            own.setdefault((*key, *series(cell)), cell)
            if cell.strategy == BASELINE and cell.plain:
                single.setdefault(key, cell)

    def scaled(cell: CellResult) -> CellResult:
        key = (cell.run_id, *setting(cell, SCALED), batch(cell))
        against_own = _efficiency(cell, own.get((*key, *series(cell))))
        against_single = _efficiency(cell, single.get(key))
        return dataclasses.replace(
            cell,
            efficiency_own=against_own.value,
            efficiency_own_low=against_own.low,
            efficiency_own_high=against_own.high,
            efficiency_single=against_single.value,
            efficiency_single_low=against_single.low,
            efficiency_single_high=against_single.high,
        )

    return [scaled(cell) if cell.ranked else cell for cell in cells]


@dataclass(frozen=True)
class _Efficiency:
    value: float | None = None
    low: float | None = None
    high: float | None = None


def _efficiency(cell: CellResult, base: CellResult | None) -> _Efficiency:
    """Returns the efficiency, with its 95 % interval if estimates exist."""
    if base is None or not base.samples_per_second or cell.samples_per_second is None:
        return _Efficiency()
    value = efficiency(cell.samples_per_second, cell.devices, base.samples_per_second)
    if cell is base or cell.log_throughput is None or base.log_throughput is None:
        return _Efficiency(value)
    against_base = ratio(cell.log_throughput, base.log_throughput, CONFIDENCE)
    low, high = against_base.low, against_base.high
    if low is None or high is None:
        return _Efficiency(value)
    return _Efficiency(value, low / cell.devices, high / cell.devices)
