"""Pairwise comparison of cells by throughput."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from harness.analysis.cell_result import CellResult
from harness.analysis.stats import (
    COMPARED_CONFIDENCE,
    ESTIMATES_CONFIDENCE,
    Comparison,
    compare_rounds,
    compare_runs,
    ratio,
)


def compared(
    cell: CellResult, other: CellResult, confidence: float | None = None
) -> Comparison | None:
    """Returns a throughput ratio, within rounds if both cells are of one run; None without trials.

    `confidence`: None for that of verdicts.
    """
    one_run, by_turns = cell.run_id == other.run_id, cell.turns and other.turns
    if one_run and cell.log_throughput and other.log_throughput and not by_turns:
        return ratio(cell.log_throughput, other.log_throughput, confidence or ESTIMATES_CONFIDENCE)
    confidence = confidence or COMPARED_CONFIDENCE
    if one_run:
        return compare_rounds(cell.by_round, other.by_round, (cell.turns, other.turns), confidence)
    return compare_runs([*cell.by_round.values()], [*other.by_round.values()], confidence)


def same(cell: CellResult, other: CellResult) -> bool:
    comparison = compared(cell, other)
    return comparison is None or comparison.verdict == "no difference seen"


def alike(ranking: Sequence[CellResult]) -> list[bool]:
    """Returns whether each cell of a ranking is tied with the one above it."""
    pairs = itertools.pairwise(ranking)
    return [False, *(same(cell, above) for above, cell in pairs)][: len(ranking)]
