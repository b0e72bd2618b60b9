"""What a cell's throughput is compared with, and by how much it differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

from harness.analysis.cell_result import CellResult
from harness.analysis.ranking import compared
from harness.analysis.setting import by_setting
from harness.analysis.stats import CONFIDENCE
from harness.spec.cell import BASELINE

Choice: TypeAlias = Callable[[CellResult], bool]
"""Whether a cell is meant."""


def baseline_of(cells: Sequence[CellResult], chosen: Choice | None = None) -> CellResult | None:
    """The cell that the others of a setting are compared with; None where there is none.

    It is the first ranked cell that is chosen; where nothing is chosen, DDP by torchrun without
    options, else the single process, and of several (weak scaling on one device is the same
    training) the one with the most launches: the plan launches a baseline more often.
    """
    ranked = [cell for cell in cells if cell.ranked]
    if chosen is not None:
        return next(filter(chosen, ranked), None)
    plain = [cell for cell in ranked if cell.plain]
    ddp = [cell for cell in plain if cell.wraps_ddp == "torchrun"]
    single = [cell for cell in plain if cell.strategy == BASELINE and cell.options == "{}"]
    return max(ddp or single, key=lambda cell: cell.trials, default=None)


def with_baselines(cells: Sequence[CellResult], chosen: Choice | None = None) -> list[CellResult]:
    """The same cells, each ranked one with its throughput over that of its setting's baseline."""
    runs: dict[str, list[CellResult]] = {}
    for cell in cells:
        runs.setdefault(cell.run_id, []).append(cell)
    baselines = {
        (cell.cell_id, cell.run_id): baseline
        for of_run in runs.values()
        for group in by_setting(of_run)
        if (baseline := baseline_of(group, chosen))
        for cell in group
    }
    return [_over(cell, baselines.get((cell.cell_id, cell.run_id))) for cell in cells]


def _over(cell: CellResult, baseline: CellResult | None) -> CellResult:
    if baseline is None or not cell.ranked:
        return cell
    if cell is baseline:
        return dataclasses.replace(cell, baseline=baseline.cell_id, over_baseline=1.0)
    ratio = compared(cell, baseline, CONFIDENCE)
    if ratio is None:
        return cell
    return dataclasses.replace(
        cell,
        baseline=baseline.cell_id,
        over_baseline=ratio.ratio,
        over_baseline_low=ratio.low,
        over_baseline_high=ratio.high,
    )
