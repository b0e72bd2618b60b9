"""A cell with its place among comparable cells."""

from __future__ import annotations

from dataclasses import dataclass

from harness.analysis.cell_result import CellResult


@dataclass(frozen=True)
class RankedCell(CellResult):
    place: int = 1
    same_as_above: bool = False
    """Whether it is tied with the one above it."""

    @classmethod
    def of(cls, cell: CellResult, place: int, same_as_above: bool) -> RankedCell:
        return cls(**vars(cell), place=place, same_as_above=same_as_above)
