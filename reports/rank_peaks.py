"""Peak memory of each rank, for cells with uneven ranks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.cell_result import CellResult
from reports.data import main_workload, rest, where
from reports.grid import Column, Grid, Td, device_columns, numeral, some_grid, word, words
from reports.text import MIB, number

MOST_UNEVEN = 16


@dataclass(frozen=True)
class Ranks:
    """Peak memory of each rank in % of the cell's mean."""

    name: str
    title: str
    axis: str
    lines: tuple[tuple[str, tuple[float, ...], str], ...]
    """(label, percentages in the order of ranks, text)."""
    summary: str
    notes: tuple[str, ...] = ()


def _of_ranks(cells: Sequence[CellResult]) -> list[CellResult]:
    """Returns multi-rank cells with measured peaks, most uneven first."""
    several = [
        cell
        for cell in cells
        if cell.status == "ok" and len(cell.memory.peak_memory_bytes_by_rank) > 1
    ]
    return sorted(several, key=imbalance, reverse=True)


def imbalance(cell: CellResult) -> float:
    """Returns the largest peak over the ranks' mean, in the trial with the largest."""
    peaks = cell.memory.peak_memory_bytes_by_rank
    return float(max(peaks) / statistics.fmean(peaks))


def chart(cells: Sequence[CellResult]) -> Ranks | None:
    rows = _of_ranks(cells)
    if not rows:
        return None
    main = main_workload(cells)
    lines = []
    for cell in rows[:MOST_UNEVEN]:
        peaks = cell.memory.peak_memory_bytes_by_rank
        mean = statistics.fmean(peaks)
        text = f"{number(imbalance(cell))} · {number(max(peaks) / MIB)} MiB"
        lines.append((where(cell, main), tuple(peak / mean * 100 for peak in peaks), text))
    summary = (
        "Peak memory of each rank in % of the mean of its cell, and in words the largest over the"
        f" mean and the largest: {'; '.join(f'{label} {text}' for label, _, text in lines[:5])}"
    )
    return Ranks(
        "ranks",
        "Peak of each rank, the most uneven cells first",
        "peak of each rank (% of the mean of the cell’s ranks)",
        tuple(lines),
        summary,
        ("right: largest over mean, largest", *rest(len(rows), MOST_UNEVEN)),
    )


def table(cells: Sequence[CellResult]) -> Grid[CellResult] | None:
    rows = _of_ranks(cells)
    columns = [
        Column("Workload", "", "", word("workload")),
        *device_columns(rows),
        Column("Uneven", "largest / mean", "", _uneven),
        Column("Peaks", "MiB, in the order of ranks", "in the trial with the largest", _peaks),
    ]
    return some_grid("ranks-table", "Peak memory of each rank", rows, columns)


def _uneven(cell: CellResult) -> Td:
    return numeral(number(imbalance(cell)), "imbalance", imbalance(cell))


def _peaks(cell: CellResult) -> Td:
    return words(", ".join(number(peak / MIB) for peak in cell.memory.peak_memory_bytes_by_rank))
