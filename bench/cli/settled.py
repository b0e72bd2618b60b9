"""The matrix that bench plan writes beside its answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.spec.cell import Cell


def matrix_written(cells: Sequence[Cell], file: Path) -> str:
    """Writes cells in order of the prediction; returns what was written, in a sentence.

    Raises UsageError where there is nothing to write, or it cannot be written.
    """
    from harness.planner.follow_up import write_matrix
    from harness.spec.errors import UsageError

    if not cells:
        raise UsageError(
            "no strategy of the suite trains with one of the best layouts, so there is nothing to"
            " measure; ask for fewer devices or another goal"
        )
    write_matrix(file, cells, "Cells that a prediction could not tell apart.")
    return (
        f"wrote {len(cells)} cells to {file}; measure them with: python -m bench run --matrix"
        f" {file}"
    )
