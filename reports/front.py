"""Chart data of memory against throughput, with the Pareto front."""

from __future__ import annotations

from dataclasses import dataclass

from reports.data import notes_for
from reports.groups import RankedGroup, pareto
from reports.names import marks, named
from reports.text import MIB, number


@dataclass(frozen=True)
class Point:
    """Memory in MiB and throughput of one cell; `place` numbers the front from its fastest end."""

    label: str
    memory: float
    memory_low: float
    throughput: float
    low: float | None
    high: float | None
    marks: str
    place: int | None


@dataclass(frozen=True)
class Scatter:
    name: str
    title: str
    unit: str
    points: tuple[Point, ...]
    summary: str
    notes: tuple[str, ...] = ()

    @property
    def front(self) -> list[Point]:
        return sorted((p for p in self.points if p.place is not None), key=lambda p: p.place or 0)


def memory_scatter(group: RankedGroup, name: str) -> Scatter | None:
    """Returns the cells with measured memory; None if fewer than three."""
    front = {cell.cell_id: place for place, cell in enumerate(pareto(group), 1)}
    cells = [cell for cell in group.rows if cell.memory.peak_memory_bytes is not None]
    if len(cells) < 3:
        return None
    points = []
    for cell in cells:
        rate = group.rate(cell)
        points.append(
            Point(
                named(cell, place=False),
                (cell.memory.peak_memory_bytes or 0) / MIB,
                (cell.memory.peak_memory_bytes_low or 0) / MIB,
                rate.value,
                rate.low,
                rate.high,
                marks(cell),
                front.get(cell.cell_id),
            )
        )
    words = "; ".join(
        f"{p.label} {number(p.throughput)} {group.unit} in {number(p.memory)} MiB"
        for p in points
        if p.place
    )
    summary = (
        f"Peak memory against throughput, {group.title}. No other cell is better in both than:"
        f" {words}"
    )
    return Scatter(name, group.title, group.unit, tuple(points), summary, notes_for(cells))
