"""Which of two cells is faster, and whose interval is still too wide to say so."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.analysis.cell_result import CellResult
from harness.analysis.setting import setting
from harness.analysis.stats import (
    COMPARED_CONFIDENCE,
    CONFIDENCE,
    LEAST_TRIALS,
    Comparison,
    Estimate,
    compare_rounds,
    compare_runs,
    ratio,
)
from harness.analysis.summary import cell_results

if TYPE_CHECKING:
    import pandas as pd


def compared(
    cell: CellResult, other: CellResult, confidence: float = COMPARED_CONFIDENCE
) -> Comparison | None:
    """The throughput of one cell over another's: within rounds where both are of one run; None
    where one has no trial."""
    if cell.run_id == other.run_id:
        by_turns = cell.turns and other.turns
        if cell.log_throughput and other.log_throughput and not by_turns:
            return ratio(cell.log_throughput, other.log_throughput, confidence)
        return compare_rounds(cell.by_round, other.by_round, (cell.turns, other.turns), confidence)
    return compare_runs([*cell.by_round.values()], [*other.by_round.values()], confidence)


def same(cell: CellResult, other: CellResult) -> bool:
    """Whether two cells cannot be told apart by their throughput."""
    comparison = compared(cell, other)
    return comparison is None or comparison.verdict == "no difference seen"


def alike(ranking: Sequence[CellResult]) -> list[bool]:
    """For cells in ranking order: whether each cannot be told apart from the one above it."""
    pairs = itertools.pairwise(ranking)
    return [False, *(same(cell, above) for above, cell in pairs)][: len(ranking)]


def too_wide(trials: pd.DataFrame, precision: float) -> dict[str, float]:
    """Ranked cell's id -> half width of its interval over its throughput, where that is above
    `precision` (a fraction) or trials are too few.

    For cells that trained in time slices with others in their setting it is the interval of their
    ratio (95 % too), the widest of them.
    """
    ranked = [cell for cell in cell_results(trials) if cell.ranked]
    widths = {cell.cell_id: _width(cell, ranked) for cell in ranked}
    few = {cell.cell_id for cell in ranked if cell.trials < LEAST_TRIALS}
    return {
        cell_id: width for cell_id, width in widths.items() if width > precision or cell_id in few
    }


def _width(cell: CellResult, ranked: Sequence[CellResult]) -> float:
    """Half width of the cell's interval as a fraction; infinite where it has none."""
    comparisons = [
        comparison
        for other in ranked
        if other is not cell
        and other.turns
        and cell.turns
        and (other.run_id, setting(other)) == (cell.run_id, setting(cell))
        and (comparison := compared(cell, other, CONFIDENCE))
    ]
    own = Estimate(
        cell.samples_per_second or 0.0,
        cell.samples_per_second_low,
        cell.samples_per_second_high,
        cell.trials,
    )
    widths = [comparison.precision for comparison in comparisons] or [own.precision]
    return max(math.inf if width is None else width for width in widths)
