from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.cell_result import CellResult
from harness.analysis.ranking import compare
from harness.analysis.setting import Setting
from harness.analysis.stats import CONFIDENCE, LEAST_TRIALS, Estimate, percentile
from harness.spec.text import plural


@dataclass(frozen=True)
class Precision:
    """Relative half widths of the 95 % intervals of throughput over the baseline's."""

    cells: int
    median: float
    nine_in_ten: float

    @property
    def sentence(self) -> str:
        median, nine_in_ten = (f"±{x * 100:.1f} %" for x in (self.median, self.nine_in_ten))
        return (
            f"throughput relative to the baseline is known to {median} (95 % interval, median of"
            f" {plural(self.cells, 'cell')}; nine in ten: {nine_in_ten})"
        )


def precision(cells: Sequence[CellResult]) -> Precision | None:
    """Returns the precision over verified cells with a baseline and a core per rank."""
    widths = list(_widths_over_baseline(cells).values())
    if not widths:
        return None
    return Precision(len(widths), statistics.median(widths), percentile(widths, 0.9))


def _widths_over_baseline(cells: Sequence[CellResult]) -> dict[str, float]:
    return {
        cell.cell_id: (cell.relative.over_baseline_high - cell.relative.over_baseline_low)
        / 2
        / cell.relative.over_baseline
        for cell in cells
        if cell.relative.over_baseline
        and cell.relative.over_baseline_low is not None
        and cell.relative.over_baseline_high is not None
        and not cell.placement.oversubscribed
    }


def too_wide(cells: Sequence[CellResult], precision: float) -> dict[str, float]:
    """Returns relative half widths above `precision`, or from too few trials, by cell. For
    interleaved cells, the setting's widest comparison counts."""
    ranked = [cell for cell in cells if cell.ranked]
    widths = {cell.cell_id: _width(cell, ranked) for cell in ranked}
    few = {cell.cell_id for cell in ranked if cell.trials < LEAST_TRIALS}
    return {
        cell_id: width for cell_id, width in widths.items() if width > precision or cell_id in few
    }


def _width(cell: CellResult, ranked: Sequence[CellResult]) -> float:
    comparisons = [
        comparison
        for other in ranked
        if other is not cell
        and other.speed.turns
        and cell.speed.turns
        and (other.run_id, Setting.of(other.cell)) == (cell.run_id, Setting.of(cell.cell))
        and (comparison := compare(cell, other, CONFIDENCE))
    ]
    own = Estimate(
        cell.speed.samples_per_second or 0.0,
        cell.speed.samples_per_second_low,
        cell.speed.samples_per_second_high,
        cell.trials,
    )
    widths = [comparison.precision for comparison in comparisons] or [own.precision]
    return max(math.inf if width is None else width for width in widths)
