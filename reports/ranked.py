"""A cell with its place among those that it may be compared with."""

from __future__ import annotations

from dataclasses import dataclass

from harness.analysis.cell_result import CellResult


@dataclass(frozen=True)
class RankedCell(CellResult):
    """A cell with its place in its group, fastest first."""

    place: int = 1
    same_as_above: bool = False
    """Cannot be told apart from the one above it."""

    @classmethod
    def of(cls, cell: CellResult, place: int, same_as_above: bool) -> RankedCell:
        return cls(**vars(cell), place=place, same_as_above=same_as_above)
