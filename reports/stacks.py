"""Data of stacked bar charts: states between steps, step times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.analysis.cell_result import CellResult
from reports.data import MOST_ROWS, notes_for, rest
from reports.text import MIB, number, plural, signed

KINDS = {
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer": "optimizer_bytes",
    "library": "library_bytes",
}
"""Kinds of states, and the result's field of each."""
WITHIN = 0.05


@dataclass(frozen=True)
class Stack:
    label: str
    parts: tuple[float, ...]
    """Values in the order of `Stacks.kinds`."""
    text: str
    formula: float | None
    peak: float | None
    hatched: bool
    """Whether it is a stand-in; oversubscription does not change states."""
    off: bool
    """Whether it is further from the formula than WITHIN."""

    @property
    def total(self) -> float:
        return sum(self.parts)


@dataclass(frozen=True)
class Stacks:
    name: str
    title: str
    axis: str
    kinds: tuple[str, ...]
    stacks: tuple[Stack, ...]
    limit: float
    """End of the axis; longer bars are cut."""
    summary: str
    notes: tuple[str, ...] = ()


def by_state_bytes(cells: Sequence[CellResult]) -> list[CellResult]:
    """Sorts cells by bytes kept between steps."""
    return sorted(cells, key=lambda cell: cell.states.state_bytes or 0.0)


def state_stacks(
    cells: Sequence[CellResult], name: str, title: str, label: Callable[[CellResult], str]
) -> Stacks:
    """Returns the states of each cell's fullest rank in MiB, least first."""
    cells = by_state_bytes(cells)
    stacks = [_stack(cell, label(cell)) for cell in cells[:MOST_ROWS]]
    ends = [max(stack.total, stack.formula or 0.0, stack.peak or 0.0) for stack in stacks]
    usual = [end for end in ends if end <= 3 * statistics.median(ends)]
    limit = max(usual, default=1.0) * 1.04 or 1.0
    cut = "▸ the bar, ▹ the peak goes on beyond the axis"
    words = "; ".join(f"{stack.label} {stack.text}" for stack in stacks[:5])
    return Stacks(
        name,
        title,
        "fullest rank (MiB)",
        tuple(KINDS),
        tuple(stacks),
        limit,
        f"States that {plural(len(cells), 'cell')} keep between steps, with their distance from the"
        f" formula, {title}, least first: {words}",
        ((cut,) if any(end > limit for end in ends) else ()) + notes_for(cells) + rest(len(cells)),
    )


def _stack(cell: CellResult, label: str) -> Stack:
    away = cell.states.formula_deviation
    text = f"{number((cell.states.state_bytes or 0.0) / MIB)} MiB"
    return Stack(
        label,
        tuple((cell.column(field) or 0.0) / MIB for field in KINDS.values()),
        text if away is None else f"{text} {signed(away)}",
        None if cell.states.formula_bytes is None else cell.states.formula_bytes / MIB,
        None if cell.memory.peak_memory_bytes is None else cell.memory.peak_memory_bytes / MIB,
        cell.placement.stand_in is not None,
        away is not None and abs(away) > WITHIN,
    )
