"""Cells grouped by the matrix's systems."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.cell_result import CellResult
from harness.record.status import NOT_LAUNCHED


@dataclass(frozen=True)
class System:
    """Cells that the matrix files under one system; a cell without one is its own system, named by
    its label."""

    name: str
    cells: tuple[CellResult, ...]

    def count(self, *statuses: str) -> int:
        """Returns the number of cells with one of these statuses."""
        return sum(cell.status in statuses for cell in self.cells)

    @property
    def absent(self) -> bool:
        """Whether this host could run none of its cells."""
        return self.count("unavailable") > 0 and self.count(*NOT_LAUNCHED) == len(self.cells)


def systems(cells: Sequence[CellResult]) -> list[System]:
    """Returns the systems ordered by the number that begins their name; those without one come
    last, in the order of the cells."""
    grouped: dict[str, list[CellResult]] = {}
    for cell in cells:
        grouped.setdefault(cell.label if cell.system is None else cell.system, []).append(cell)

    def number(name: str) -> int:
        digits = re.match(r"\d{1,9}", name)
        return int(digits.group()) if digits else 10**9

    return [System(name, tuple(grouped[name])) for name in sorted(grouped, key=number)]
