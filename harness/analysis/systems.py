"""Cells grouped by the matrix's systems."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.cell_result import CellResult
from harness.record.status import NOT_LAUNCHED


@dataclass(frozen=True)
class System:
    """Cells of one system of the matrix; a cell without one is its own system."""

    name: str
    cells: tuple[CellResult, ...]

    def count(self, *statuses: str) -> int:
        return sum(cell.status in statuses for cell in self.cells)

    @property
    def absent(self) -> bool:
        """Whether this host could run none of its cells."""
        return self.count("unavailable") > 0 and self.count(*NOT_LAUNCHED) == len(self.cells)


def systems(cells: Sequence[CellResult]) -> list[System]:
    """Returns systems by the number that begins their name; those without one come last."""
    grouped: dict[str, list[CellResult]] = {}
    for cell in cells:
        grouped.setdefault(cell.cell.system or cell.cell.label, []).append(cell)

    def number(name: str) -> int:
        digits = re.match(r"\d{1,9}", name)
        return int(digits.group()) if digits else 10**9

    return [System(name, tuple(grouped[name])) for name in sorted(grouped, key=number)]
