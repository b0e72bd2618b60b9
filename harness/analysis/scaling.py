"""Scaling efficiency: throughput over that of one device, times the number of devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from harness.analysis.cell_result import CellResult
from harness.analysis.setting import SCALED, batch, series, setting
from harness.analysis.stats import efficiency
from harness.spec.cell import BASELINE


def with_efficiencies(cells: Sequence[CellResult]) -> list[CellResult]:
    """The same cells with their scaling efficiencies.

    Weak scaling compares with one device at the batch that each device has.
    """
    own: dict[tuple[object, ...], float] = {}
    single: dict[tuple[object, ...], float] = {}
    for cell in cells:
        if cell.ranked and cell.devices == 1 and cell.samples_per_second is not None:
            key = (cell.run_id, *setting(cell, SCALED), cell.global_batch)
            own.setdefault((*key, *series(cell)), cell.samples_per_second)
            if cell.strategy == BASELINE and cell.micro_batches == 1:
                single.setdefault(key, cell.samples_per_second)

    def scaled(cell: CellResult) -> CellResult:
        key = (cell.run_id, *setting(cell, SCALED), batch(cell))
        return dataclasses.replace(
            cell,
            efficiency_own=_efficiency(cell, own.get((*key, *series(cell)))),
            efficiency_single=_efficiency(cell, single.get(key)),
        )

    return [scaled(cell) if cell.ranked else cell for cell in cells]


def _efficiency(cell: CellResult, base: float | None) -> float | None:
    if not base or cell.samples_per_second is None:
        return None
    return efficiency(cell.samples_per_second, cell.devices, base)
