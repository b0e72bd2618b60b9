"""Cost of each library's wrapper around DDP."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.cell_result import CellResult
from harness.spec.cell import TECHNIQUES
from reports.data import Bars, throughput_bars
from reports.grid import (
    Column,
    Grid,
    Part,
    Td,
    figure,
    grid,
    mebibytes,
    milliseconds,
    throughput_column,
    words,
)
from reports.groups import RankedGroup, by_setting, ranking
from reports.names import marks
from reports.ranked import RankedCell
from reports.text import exact, number, scaled


@dataclass(frozen=True)
class Wrappers:
    title: str
    bars: Bars
    grid: Grid[WrappedCell]


@dataclass(frozen=True)
class WrappedCell(RankedCell):
    """A cell that wraps DDP against the fastest such cell, by median throughput over trials."""

    step_ratio: float = 1.0
    """Step time over the fastest's."""
    extra_seconds: float = 0.0
    """Seconds per step beyond the fastest's."""


def wrappers(cells: Sequence[CellResult]) -> list[Wrappers]:
    """Returns a comparison for each setting in which several cells wrap DDP."""
    wrapping = [cell for cell in cells if cell.ranked and cell.placement.wraps_ddp is not None]
    groups = by_setting(wrapping, *TECHNIQUES, "regime")
    several = [ranking(group.rows) for group in groups if len(group.rows) > 1]
    return [_wrappers(group, f"wrappers-{i}") for i, group in enumerate(several)]


def _wrappers(group: RankedGroup, name: str) -> Wrappers:
    libraries = Counter(cell.placement.wraps_ddp for cell in group.rows)
    labels = {
        cell.cell_id: f"{cell.placement.wraps_ddp}"
        + (f": {cell.cell.label}" if libraries[cell.placement.wraps_ddp] > 1 else "")
        for cell in group.rows
    }
    title = group.full_title
    bars = dataclasses.replace(throughput_bars(group, name, labels), title=title)
    rows = [_against(cell, group.rows[0]) for cell in group.rows]
    columns: list[Column[WrappedCell]] = [
        Column("Wrapper", "", "", lambda cell: words(f"{cell.placement.wraps_ddp}{marks(cell)}")),
        throughput_column(rows),
        Column("Step p50", "ms", "median over the steps", milliseconds("step_seconds_p50")),
        Column(
            "Step time",
            "x fastest",
            "geometric mean of its trials, over that of the fastest here",
            figure("step_ratio", number),
        ),
        Column("Extra", "ms per step", "beyond the fastest here", _extra),
        Column(
            "Start-up",
            "s",
            "until the last rank's first instruction",
            figure("startup_seconds", number),
        ),
        Column("Set-up", "s", "process group, model, wrapping", figure("setup_seconds", number)),
        Column("Peak memory", "MiB", "fullest device", mebibytes("peak_memory_bytes")),
        Column(
            "Library's buffers", "MiB", "fullest rank, between steps", mebibytes("library_bytes")
        ),
    ]
    table = grid(f"{name}-table", f"What each wrapper costs, {title}", rows, columns)
    return Wrappers(title, bars, table)


def _against(cell: RankedCell, fastest: RankedCell) -> WrappedCell:
    own, best = (c.cell.global_batch / (c.speed.samples_per_second or 1.0) for c in (cell, fastest))
    return WrappedCell(**vars(cell), step_ratio=own / best, extra_seconds=own - best)


def _extra(cell: WrappedCell) -> Td:
    seconds = cell.extra_seconds
    shown = Part("0" if seconds == 0 else scaled(seconds, 1e3), "extra_seconds", exact(seconds))
    if not cell.same_as_above:
        return Td((shown,))
    return Td((shown, Part(" ≈")), tip="cannot be told apart from the one above")
