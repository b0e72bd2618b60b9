"""Data of bar charts with a bar per cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from harness.analysis.cell_result import CellResult
from reports.groups import RankedGroup, tied_with_fastest
from reports.names import OVERSUBSCRIBED, STAND_IN, marks, named
from reports.text import MIB, number, plural, shortened

MOST_ROWS = 60
LABEL = 52  # Characters that fit the width of a chart.
NOTES = {
    STAND_IN: f"{STAND_IN} hatched: a stand-in ran instead of the real thing",
    OVERSUBSCRIBED: (
        f"{OVERSUBSCRIBED} hatched: more ranks than cores, its times say nothing of real hardware"
    ),
}
ALIKE = "≈ cannot be told apart from the one above: no difference is seen within rounds"


@dataclass(frozen=True)
class Bar:
    """One line of a bar or dot chart, in the chart's unit."""

    label: str
    value: float | None
    text: str
    low: float | None = None
    high: float | None = None
    strong: bool = False
    marks: str = ""
    target: float | None = None
    """Theoretical value, or tolerance."""
    failed: bool = False


@dataclass(frozen=True)
class Bars:
    name: str
    """HTML id, unique in the page."""
    title: str
    axis: str
    """Quantity with its unit."""
    bars: tuple[Bar, ...]
    summary: str
    """Text for screen readers."""
    notes: tuple[str, ...] = ()
    logarithmic: bool = False
    target: str = ""
    """Meaning of `Bar.target`."""


def notes_for(cells: Sequence[CellResult]) -> tuple[str, ...]:
    seen = "".join(marks(cell) for cell in cells)
    return tuple(text for mark, text in NOTES.items() if mark in seen)


def rest(total: int, most: int = MOST_ROWS) -> tuple[str, ...]:
    return (f"the first {most} of {total}; all are in the table",) if total > most else ()


def first_few(items: Sequence[Bar], most: int, unit: str = "") -> str:
    """Describes the first bars, for a screen reader."""
    return "; ".join(f"{bar.label} {bar.text}{unit}" for bar in items[:most])


def throughput_bars(
    group: RankedGroup, name: str, labels: Mapping[str, str] = MappingProxyType({})
) -> Bars:
    """Returns throughputs with 95 % intervals, fastest first; strong: tied with the fastest.

    `labels`: by cell id, for cells whose own label is not to be shown.
    """
    fastest = group.rows[0]
    best = {fastest.cell_id, *(cell.cell_id for cell in tied_with_fastest(group.rows))}
    bars = []
    for cell in group.rows[:MOST_ROWS]:
        rate = group.rate(cell)
        spread = "" if rate.half_width is None else f" ± {number(rate.half_width, 2)}"
        text = number(rate.value) + spread + (" ≈" if cell.same_as_above else "")
        strong = cell.cell_id in best
        label = named(cell, place=False, label=labels.get(cell.cell_id, ""))
        bars.append(Bar(label, rate.value, text, rate.low, rate.high, strong, marks(cell)))
    alike = (ALIKE,) if any(cell.same_as_above for cell in group.rows) else ()
    return Bars(
        name,
        group.title,
        f"throughput ({group.unit}), 95 % interval",
        tuple(bars),
        f"Throughput of {plural(len(group.rows), 'cell')}, {group.title}, fastest first: "
        + first_few(bars, 5, f" {group.unit}"),
        alike + notes_for(group.rows) + rest(len(group.rows)),
    )


def memory_bars(group: RankedGroup, name: str) -> Bars | None:
    """Returns peak memory in MiB with the range over trials, smallest first."""
    peaks = [
        (c.memory.peak_memory_bytes / MIB, c)
        for c in group.rows
        if c.memory.peak_memory_bytes is not None
    ]
    if not peaks:
        return None
    peaks.sort(key=lambda pair: pair[0])
    bars = []
    for peak, cell in peaks[:MOST_ROWS]:
        low = (cell.memory.peak_memory_bytes_low or 0) / MIB
        strong = low <= peaks[0][0]
        shown_low = low if cell.trials > 1 else None
        label = named(cell, place=False)
        bars.append(Bar(label, peak, number(peak), shown_low, peak, strong, marks(cell)))
    return Bars(
        name,
        group.title,
        "peak memory of the fullest device (MiB), range over trials",
        tuple(bars),
        f"Peak memory of {plural(len(peaks), 'cell')}, {group.title}, smallest first: "
        + first_few(bars, 5, " MiB"),
        notes_for([cell for _, cell in peaks]) + rest(len(peaks)),
    )


def where(cell: CellResult, workload: str) -> str:
    """Names a cell in a chart of mixed settings: `label x2 bf16`, and its workload if not
    `workload`."""
    other = "" if cell.cell.workload == workload else f" {cell.cell.workload}"
    setting = f" x{cell.cell.devices} {cell.cell.precision}{other}"
    return shortened(named(cell), max(12, LABEL - len(setting))) + setting


def main_workload(cells: Sequence[CellResult]) -> str:
    return Counter(cell.cell.workload for cell in cells).most_common(1)[0][0]
