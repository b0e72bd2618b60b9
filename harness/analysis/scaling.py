"""Scaling efficiency: throughput over that of one device times the number of devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from harness.analysis.cell_result import CellResult, Speed
from harness.analysis.setting import SCALED, batch, series, setting
from harness.analysis.stats import CONFIDENCE, efficiency, ratio
from harness.spec.cell import BASELINE


def with_efficiencies(cells: Sequence[CellResult]) -> list[CellResult]:
    """Returns the same cells with scaling efficiencies. Weak scaling compares at equal batch per
    device."""
    own: dict[tuple[object, ...], CellResult] = {}
    single: dict[tuple[object, ...], CellResult] = {}
    for cell in cells:
        if cell.ranked and cell.cell.devices == 1 and cell.speed.samples_per_second is not None:
            key = (cell.run_id, *setting(cell.cell, SCALED), cell.cell.global_batch)
            own.setdefault((*key, *series(cell.cell)), cell)
            if cell.cell.strategy == BASELINE and cell.cell.plain:
                single.setdefault(key, cell)

    def scaled(cell: CellResult) -> CellResult:
        key = (cell.run_id, *setting(cell.cell, SCALED), batch(cell.cell))
        efficiencies = _efficiency("own", cell, own.get((*key, *series(cell.cell))))
        efficiencies |= _efficiency("single", cell, single.get(key))
        relative = dataclasses.replace(cell.relative, **efficiencies)
        return dataclasses.replace(cell, relative=relative)

    return [scaled(cell) if cell.ranked else cell for cell in cells]


def _efficiency(against: str, cell: CellResult, base: CellResult | None) -> dict[str, Any]:
    """Returns fields of `Relative`: the efficiency, with its 95 % interval if estimates exist."""
    own, other, devices = cell.speed, base.speed if base else Speed(), cell.cell.devices
    if not other.samples_per_second or own.samples_per_second is None:
        return {}
    name = f"efficiency_{against}"
    value = efficiency(own.samples_per_second, devices, other.samples_per_second)
    if cell is base or own.log_throughput is None or other.log_throughput is None:
        return {name: value}
    ends = ratio(own.log_throughput, other.log_throughput, CONFIDENCE)
    if ends.low is None or ends.high is None:
        return {name: value}
    return {name: value, f"{name}_low": ends.low / devices, f"{name}_high": ends.high / devices}
