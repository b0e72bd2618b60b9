"""What bench plan writes beside its answer: a matrix, and the choice as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.spec.cell import Cell


def write_settled(cells: Sequence[Cell], matrix: Path | None, export: Path | None) -> list[str]:
    """Writes the files that are asked for, of cells in order of the prediction; returns what was
    written, in sentences.

    Raises UsageError where there is nothing to write, or it cannot be written.
    """
    from bench.settle import export_first, write_matrix
    from harness.spec.errors import UsageError

    if (matrix or export) and not cells:
        raise UsageError(
            "no strategy of the suite trains with one of the best layouts, so there is nothing to"
            " write; ask for fewer devices or another goal"
        )
    written = []
    if matrix:
        write_matrix(matrix, cells, "Cells that a prediction could not tell apart.")
        written.append(
            f"wrote {len(cells)} cells to {matrix}; measure them with: python -m bench run --matrix"
            f" {matrix}"
        )
    if export:
        cell, targets = export_first(cells, export)
        skipped = cells.index(cell)
        better = f", the best that has an export after {skipped} without one" if skipped else ""
        written.append(f"wrote {cell.label}{better} to {export} for {', '.join(targets)}")
    return written
