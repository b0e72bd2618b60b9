from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.cell_result import CellResult
from harness.analysis.stats import percentile
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
