"""Pairwise comparison of cells by throughput."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from harness.analysis.cell_result import CellResult
from harness.analysis.stats import (
    ACROSS_RUNS_CONFIDENCE,
    WITHIN_RUN_CONFIDENCE,
    Comparison,
    compare_rounds,
    compare_runs,
    ratio,
)


def compare(
    cell: CellResult, other: CellResult, confidence: float | None = None
) -> Comparison | None:
    """Returns a throughput ratio, within rounds if both cells are of one run; None without trials.

    `confidence`: None for that of verdicts.
    """
    one_run, by_turns = cell.run_id == other.run_id, cell.speed.turns and other.speed.turns
    if one_run and cell.speed.log_throughput and other.speed.log_throughput and not by_turns:
        return ratio(
            cell.speed.log_throughput,
            other.speed.log_throughput,
            confidence or WITHIN_RUN_CONFIDENCE,
        )
    confidence = confidence or ACROSS_RUNS_CONFIDENCE
    if one_run:
        return compare_rounds(
            cell.speed.by_round,
            other.speed.by_round,
            (cell.speed.turns, other.speed.turns),
            confidence,
        )
    return compare_runs(
        [*cell.speed.by_round.values()], [*other.speed.by_round.values()], confidence
    )


def is_tied(cell: CellResult, other: CellResult) -> bool:
    comparison = compare(cell, other)
    return comparison is None or comparison.verdict == "no difference seen"


def tied_with_previous(ranking: Sequence[CellResult]) -> list[bool]:
    """Returns whether each cell of a ranking is tied with the one above it."""
    pairs = itertools.pairwise(ranking)
    return [False, *(is_tied(cell, above) for above, cell in pairs)][: len(ranking)]
