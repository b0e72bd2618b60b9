"""The fastest, the most frugal, and the best trade-off of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reports.groups import RankedGroup, fairly_timed, of_real_things, tied_with_fastest
from reports.ranked import RankedCell
from reports.text import MIB, number, percent, plural


@dataclass(frozen=True)
class Pick:
    """The best cell in one respect, as text."""

    row: RankedCell
    value: str
    interval: str
    tied: tuple[RankedCell, ...]
    """Cells tied with it."""
    then: str = ""
    """Consequence for the other respect."""


@dataclass(frozen=True)
class FastestVerdict:
    """The best cells of a group, each with its interval."""

    group: RankedGroup
    fastest: Pick
    frugal: Pick | None
    balanced: Pick | None
    """Most throughput for its peak memory."""
    faster: Pick | None
    """A faster stand-in or oversubscribed cell. It does not lead: its times do not hold for the
    real thing."""


def verdict(group: RankedGroup) -> FastestVerdict:
    """Returns the fastest and most frugal cells, preferring real things.

    Oversubscription changes a cell's times, not its memory.
    """
    timed, first = fairly_timed(group), group.rows[0]
    fastest = timed[0]
    return FastestVerdict(
        group,
        fast(group, fastest, tuple(tied_with_fastest(timed))),
        _frugal(of_real_things(group), fastest),
        _balanced(group, timed, fastest),
        fast(group, first, ()) if fastest is not first else None,
    )


def fast(group: RankedGroup, cell: RankedCell, tied: tuple[RankedCell, ...]) -> Pick:
    """Returns a cell with its throughput. `tied`: cells that may be as fast."""
    rate = group.rate(cell)
    interval = "1 trial: no interval"
    if rate.low is not None:
        trials = plural(cell.trials, "trial")
        interval = f"95 % interval {number(rate.low)} to {number(rate.high)}, {trials}"
    return Pick(cell, f"{number(rate.value)} {group.unit}", interval, tied)


def _peak(cell: RankedCell) -> int:
    assert cell.memory.peak_memory_bytes is not None
    return cell.memory.peak_memory_bytes


def _frugal(genuine: Sequence[RankedCell], fastest: RankedCell) -> Pick | None:
    cells = [cell for cell in genuine if cell.memory.peak_memory_bytes is not None]
    if not cells:
        return None
    cell = min(cells, key=lambda c: (_peak(c), -(c.speed.samples_per_second or 0.0)))
    peak, low = _peak(cell), cell.memory.peak_memory_bytes_low
    interval = "1 trial: no range"
    if cell.trials > 1 and low is not None:
        interval = f"largest of {plural(cell.trials, 'trial')}, smallest {number(low / MIB)} MiB"
    tied = tuple(
        c for c in cells if c is not cell and (c.memory.peak_memory_bytes_low or 0) <= peak
    )
    then = ""
    if cell is not fastest and fastest.memory.peak_memory_bytes is not None:
        then = f"{percent(1 - peak / fastest.memory.peak_memory_bytes)} less than the fastest needs"
        if cell.placement.oversubscribed == fastest.placement.oversubscribed:
            speed = (cell.speed.samples_per_second or 0.0) / (
                fastest.speed.samples_per_second or 1.0
            )
            then += f", at {percent(speed)} of its throughput"
    return Pick(cell, f"{number(peak / MIB)} MiB", interval, tied, then)


def _balanced(group: RankedGroup, timed: Sequence[RankedCell], fastest: RankedCell) -> Pick | None:
    """Returns the cell with the most throughput for its peak memory, and those whose interval
    reaches it."""
    cells = [cell for cell in timed if cell.memory.peak_memory_bytes is not None]
    if not cells:
        return None

    def worth(cell: RankedCell, end: str = "") -> float:
        rate = group.rate(cell)
        figure = {"": rate.value, "low": rate.low, "high": rate.high}[end]
        return (rate.value if figure is None else figure) * MIB / _peak(cell)

    cell = max(cells, key=worth)
    interval = "1 trial: no interval"
    if cell.trials > 1:
        ends = f"{number(worth(cell, 'low'))} to {number(worth(cell, 'high'))}"
        interval = f"95 % interval {ends}"
    tied = tuple(
        c
        for c in cells
        if c is not cell and cell.trials > 1 and worth(c, "high") >= worth(cell, "low")
    )
    then = ""
    if cell is not fastest and fastest.memory.peak_memory_bytes is not None:
        speed = percent(group.rate(cell).value / group.rate(fastest).value)
        memory = percent(_peak(cell) / fastest.memory.peak_memory_bytes)
        then = f"{speed} of the fastest's throughput in {memory} of its memory"
    return Pick(cell, f"{number(worth(cell))} {group.unit} per MiB", interval, tied, then)
