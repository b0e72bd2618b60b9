"""Chart data of pipeline bubbles, measured and in theory."""

from __future__ import annotations

from collections.abc import Sequence

from harness.analysis.cell_result import CellResult
from reports.data import MOST_ROWS, Bar, Bars, first_few, main_workload, notes_for, rest, where
from reports.names import marks
from reports.text import percent


def bubble_theory(stages: int, micro_batches: int) -> float:
    """Returns (p - 1) / (m + p - 1) for p stages and m micro-batches (Huang et al., arXiv
    1811.06965)."""
    return (stages - 1) / (micro_batches + stages - 1)


def bubble_bars(cells: Sequence[CellResult], name: str) -> Bars | None:
    """Returns measured and theoretical pipeline bubbles in %, smallest first."""
    measured = [
        (cell.times.bubble_fraction, bubble_theory(stages, cell.cell.micro_batches), cell)
        for cell in cells
        if cell.times.bubble_fraction is not None
        and (stages := cell.placement.pipeline_parallel or 0) > 1
    ]
    if not measured:
        return None
    measured.sort(key=lambda row: row[0])
    main = main_workload(cells)
    bars = []
    for share, theory, cell in measured[:MOST_ROWS]:
        text = f"{percent(share)} ({percent(theory)})"
        label = where(cell, main)
        bars.append(Bar(label, share * 100, text, marks=marks(cell), target=theory * 100))
    return Bars(
        name,
        "Share of stage time spent waiting",
        "bubble (% of stage time), in brackets the theory's",
        tuple(bars),
        "Pipeline bubble, measured and in brackets by theory: " + first_few(bars, 8),
        notes_for([cell for *_, cell in measured]) + rest(len(measured)),
        False,
        "theory",
    )
