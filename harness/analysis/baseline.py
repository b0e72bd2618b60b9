from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

from harness.analysis.cell_result import CellResult, Speed
from harness.analysis.ranking import compare
from harness.analysis.setting import SCALED, batch, by_setting, grouped, series, setting
from harness.analysis.stats import CONFIDENCE, efficiency, ratio
from harness.spec.cell import BASELINE, TECHNIQUES, Cell

Choice: TypeAlias = Callable[[Cell], bool]


def baseline_of(cells: Sequence[CellResult], chosen: Choice | None = None) -> CellResult | None:
    """Returns a setting's baseline, if any: the plainest ranked cell that `chosen` accepts; by
    default DDP under torchrun without options, else the single process. Prefers more trials."""
    ranked = [cell for cell in cells if cell.ranked]
    if chosen is not None:
        accepted = [result for result in ranked if chosen(result.cell)]
        return min(accepted, key=lambda r: (additions(r.cell), -r.trials), default=None)
    plain = [result for result in ranked if result.cell.plain]
    ddp = [result for result in plain if result.placement.wraps_ddp == "torchrun"]
    single = [r for r in plain if r.cell.strategy == BASELINE and not r.cell.options]
    return max(ddp or single, key=lambda result: result.trials, default=None)


def additions(cell: Cell) -> int:
    """Returns the number of options and techniques in the cell's label."""
    named = ("launcher", "checkpoint_from", *TECHNIQUES)
    return len(cell.options) + sum(map(cell.is_set, named))


def with_baselines(cells: Sequence[CellResult], chosen: Choice | None = None) -> list[CellResult]:
    baselines = {
        (cell.cell_id, cell.run_id): baseline
        for of_run in grouped(cells, lambda cell: cell.run_id).values()
        for group in by_setting(of_run)
        if (baseline := baseline_of(group, chosen))
        for cell in group
    }
    return [_over(cell, baselines.get((cell.cell_id, cell.run_id))) for cell in cells]


def _over(cell: CellResult, baseline: CellResult | None) -> CellResult:
    if baseline is None or not cell.ranked:
        return cell
    if cell is baseline:
        relative = dataclasses.replace(cell.relative, baseline=baseline.cell_id, over_baseline=1.0)
    elif ratio := compare(cell, baseline, CONFIDENCE):
        relative = dataclasses.replace(
            cell.relative,
            baseline=baseline.cell_id,
            over_baseline=ratio.ratio,
            over_baseline_low=ratio.low,
            over_baseline_high=ratio.high,
        )
    else:
        return cell
    return dataclasses.replace(cell, relative=relative)


def with_efficiencies(cells: Sequence[CellResult]) -> list[CellResult]:
    """Adds scaling efficiencies. Weak scaling compares cells of equal batch per device.

    `efficiency_own` uses the one-device cell with as many micro-batches, else one with equally
    large ones; `efficiency_single` the plain single process, else the same.
    """
    single_devices: dict[tuple[object, ...], CellResult] = {}
    single: dict[tuple[object, ...], CellResult] = {}
    for cell in cells:
        if cell.ranked and cell.cell.devices == 1 and cell.speed.samples_per_second is not None:
            key = (cell.run_id, *setting(cell.cell, SCALED), cell.cell.global_batch)
            for alike in scaling_series(cell):
                single_devices.setdefault((*key, *alike), cell)
            if cell.cell.strategy == BASELINE and cell.cell.plain:
                single.setdefault(key, cell)
            if cell.cell.strategy == BASELINE and _one_micro_batch(cell.cell).plain:
                single.setdefault((*key, micro_batch(cell)), cell)

    def scaled(cell: CellResult) -> CellResult:
        key = (cell.run_id, *setting(cell.cell, SCALED), batch(cell.cell))
        bases = [
            base for alike in scaling_series(cell) if (base := single_devices.get((*key, *alike)))
        ]
        of_own, own_low, own_high = _efficiency(cell, bases[0] if bases else None)
        plain = single.get(key) or single.get((*key, micro_batch(cell)))
        of_single, single_low, single_high = _efficiency(cell, plain)
        relative = dataclasses.replace(
            cell.relative,
            efficiency_own=of_own,
            efficiency_own_low=own_low,
            efficiency_own_high=own_high,
            efficiency_single=of_single,
            efficiency_single_low=single_low,
            efficiency_single_high=single_high,
        )
        return dataclasses.replace(cell, relative=relative)

    return [scaled(cell) if cell.ranked else cell for cell in cells]


def scaling_series(result: CellResult) -> tuple[tuple[object, ...], ...]:
    """Returns keys of a scaling curve with equally many micro-batches, and with equally large ones.

    Prefer the former.
    """
    cell = result.cell
    return series(cell), (*series(_one_micro_batch(cell)), micro_batch(result))


def _one_micro_batch(cell: Cell) -> Cell:
    return cell.model_copy(update={"micro_batches": 1})


def micro_batch(result: CellResult) -> float:
    """Returns a data-parallel rank's samples per micro-batch."""
    cell = result.cell
    ranks = result.placement.data_parallel or cell.devices
    return cell.global_batch / ranks / cell.micro_batches


def _efficiency(
    cell: CellResult, base: CellResult | None
) -> tuple[float | None, float | None, float | None]:
    speed, other, devices = cell.speed, base.speed if base else Speed(), cell.cell.devices
    if not other.samples_per_second or speed.samples_per_second is None:
        return None, None, None
    value = efficiency(speed.samples_per_second, devices, other.samples_per_second)
    if cell is base or speed.log_throughput is None or other.log_throughput is None:
        return value, None, None
    ends = ratio(speed.log_throughput, other.log_throughput, CONFIDENCE)
    if ends.low is None or ends.high is None:
        return value, None, None
    return value, ends.low / devices, ends.high / devices
