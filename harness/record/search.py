"""Cells and records of a search for the largest model or the longest sequence."""

from __future__ import annotations

from typing import Any

from harness.spec.cell import Cell

SearchPlan = dict[str, Any]
"""A plan's search, as JSON: budget, tokens, order and predictions."""
MATRIX = "maxsize"


KINDS = ("parameters", "gradients", "optimizer", "library")


COLUMNS = dict(zip(KINDS, ("parameter", "gradient", "optimizer", "library"), strict=True))


def cell_at_size(cell: Cell, steps: int, tokens: int = 0) -> Cell:
    """Returns the cell after this many search steps: `llama-320x1` becomes `llama-320x40`, or its
    sequences become 40 times `tokens` long.

    `tokens`: growth per step; 0: the model grows by a block instead.
    """
    if tokens:
        return cell.model_copy(update={"sequence_length": steps * tokens})
    return cell.model_copy(update={"workload": f"{cell.workload.rpartition('x')[0]}x{steps}"})


def base_cell(cell: Cell, tokens: int = 0) -> Cell:
    """Returns the one-step cell that a probe's cell was made from."""
    return cell_at_size(cell, 1, tokens)


def steps_of(cell: Cell, tokens: int = 0) -> int:
    return cell.sequence_length // tokens if tokens else int(cell.workload.rpartition("x")[2])


NOT_A_SIZE_LIMIT = ("failed", "timeout", "diverged", "unavailable", "refused")
