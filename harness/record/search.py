"""What a search for the largest model records, and the names of its cells."""

from __future__ import annotations

from harness.spec.cell import Cell

MATRIX = "maxsize"


KINDS = ("parameters", "gradients", "optimizer", "library")


COLUMNS = dict(zip(KINDS, ("parameter", "gradient", "optimizer", "library"), strict=True))


def sized(cell: Cell, blocks: int) -> Cell:
    """The cell with that many blocks: `llama-320x1` becomes `llama-320x40`."""
    return cell.model_copy(update={"workload": f"{cell.workload.rpartition('x')[0]}x{blocks}"})


def family(cell: Cell) -> Cell:
    """The cell of one block that a probe's cell was made from."""
    return sized(cell, 1)


ODD = ("failed", "timeout", "diverged", "unavailable", "refused")
