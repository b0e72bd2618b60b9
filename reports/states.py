"""Where the memory goes: what each rank keeps between steps against the formula, and what each rank
needs at its peak."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reports.data import MOST_ROWS, main_workload, notes_for, rest, where
from reports.groups import Row, by_setting, named
from reports.table import Column, Grid, Part, Td, device_columns, figure, grid, mebibytes, word
from reports.text import MIB, exact, missing, number, plural, scaled, signed, size

KINDS = {
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer": "optimizer_bytes",
    "library": "library_bytes",
}
WITHIN = 0.05
MOST_UNEVEN = 16
_SMALL = 1e-3  # share of the states below which a buffer is not named


@dataclass(frozen=True)
class Stack:
    """One line of a chart of stacked bars, in MiB."""

    label: str
    parts: tuple[float, ...]
    """As `Stacks.kinds`."""
    text: str
    formula: float | None
    peak: float | None
    hatched: bool
    """A stand-in; more ranks than cores say nothing against what is kept."""
    off: bool
    """Further from the formula than WITHIN."""

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
    """End of the axis; bars that go beyond it are cut."""
    summary: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ranks:
    """Peak memory of each rank in % of the mean of its cell's ranks, a line per cell."""

    name: str
    title: str
    axis: str
    lines: tuple[tuple[str, tuple[float, ...], str], ...]
    """Label, shares in the order of ranks, text."""
    summary: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Buffers:
    """Cells whose library keeps the same buffers."""

    names: tuple[tuple[str, str], ...]
    """Name and size, largest first."""
    rows: tuple[Row, ...]


def known(cells: Sequence[Row]) -> list[Row]:
    """Cells whose states between steps were measured."""
    return [row for row in cells if row["status"] == "ok" and not missing(row.get("state_bytes"))]


def charts(cells: Sequence[Row]) -> list[Stacks]:
    """A chart for each setting with several cells."""
    groups = [group for group in by_setting(known(cells)) if len(group.rows) > 1]
    main = groups[0].workload if groups else ""
    found = []
    for index, group in enumerate(groups):
        title = group.title if group.workload == main else f"{group.workload} · {group.title}"
        found.append(stacked(group.rows, f"states-{index}", title, named))
    return found


def stacked(rows: Sequence[Row], name: str, title: str, label: Callable[[Row], str]) -> Stacks:
    """What the fullest rank of each cell keeps between steps, least first."""
    rows = sorted(rows, key=lambda row: float(row["state_bytes"]))
    stacks = []
    for row in rows[:MOST_ROWS]:
        away = row["formula_deviation"]
        text = f"{number(row['state_bytes'] / MIB)} MiB" + (
            "" if missing(away) else f" {signed(away)}"
        )
        formula, peak = (
            None if missing(row[column]) else float(row[column]) / MIB
            for column in ("formula_bytes", "peak_memory_bytes")
        )
        parts = tuple(float(row[column]) / MIB for column in KINDS.values())
        off = not missing(away) and abs(away) > WITHIN
        stacks.append(
            Stack(label(row), parts, text, formula, peak, not missing(row["stand_in"]), off)
        )
    ends = [max(stack.total, stack.formula or 0.0, stack.peak or 0.0) for stack in stacks]
    limit = (
        max([end for end in ends if end <= 3 * statistics.median(ends)], default=1.0) * 1.04 or 1.0
    )
    cut = (
        ("▸ the bar, ▹ the peak goes on beyond the axis",)
        if any(end > limit for end in ends)
        else ()
    )
    words = "; ".join(f"{stack.label} {stack.text}" for stack in stacks[:5])
    summary = (
        f"States that {plural(len(rows), 'cell')} keep between steps, with their distance from the"
        f" formula, {title}, least first: {words}"
    )
    return Stacks(
        name,
        title,
        "fullest rank (MiB)",
        tuple(KINDS),
        tuple(stacks),
        limit,
        summary,
        cut + notes_for(rows) + rest(len(rows)),
    )


def table(cells: Sequence[Row]) -> Grid | None:
    """The same of all cells, with the formula's share for each kind and what is kept off the
    device."""
    rows = [
        row
        for group in by_setting(known(cells))
        for row in sorted(group.rows, key=lambda row: float(row["state_bytes"]))
    ]
    columns = [
        Column("Workload", "", "", word("workload")),
        *device_columns(rows),
        *(
            Column(
                kind.capitalize(),
                "MiB",
                f"{kind} of the fullest rank between steps",
                mebibytes(column),
            )
            for kind, column in KINDS.items()
        ),
        Column("Together", "MiB", "", mebibytes("state_bytes")),
        Column(
            "Formula",
            "MiB",
            "for the dtypes and copies that the library keeps",
            mebibytes("formula_bytes"),
        ),
        Column("Off by", "", "measured over formula", figure("formula_deviation", signed)),
        Column(
            "Step adds",
            "MiB",
            "by the formula: gradients, gathered parameters",
            mebibytes("formula_transient_bytes"),
        ),
        Column(
            "Peak",
            "MiB",
            "of the fullest device, everything included",
            mebibytes("peak_memory_bytes"),
        ),
        Column(
            "In host memory",
            "MiB",
            "kept off the device",
            figure("host_state_bytes", lambda v: scaled(v or None, 1 / MIB)),
        ),
    ]
    return grid("states-table", "States between steps against the formula", rows, columns)


def buffers(cells: Sequence[Row]) -> list[Buffers]:
    """The library's buffers by name, largest first; cells with the same ones together."""
    grouped: dict[tuple[tuple[str, str], ...], tuple[float, list[Row]]] = {}
    for row in known(cells):
        try:
            named_bytes = json.loads(str(row["library_buffers"]))
        except ValueError:
            continue
        if not isinstance(named_bytes, dict):
            continue
        sizes = sorted(
            ((str(name), float(value)) for name, value in named_bytes.items()),
            key=lambda pair: -pair[1],
        )
        large = [(name, value) for name, value in sizes if value >= _SMALL * row["state_bytes"]]
        small = [value for _, value in sizes[len(large) :]]
        if large:
            names = [(name, size(value)) for name, value in large]
            names += [(f"{plural(len(small), 'smaller one')}", size(sum(small)))] if small else []
            grouped.setdefault(tuple(names), (large[0][1], []))[1].append(row)
    found = sorted(grouped.items(), key=lambda item: -item[1][0])
    return [Buffers(names, tuple(rows)) for names, (_, rows) in found]


def _of_ranks(cells: Sequence[Row]) -> list[Row]:
    """Cells of several ranks whose peaks are known, the most uneven first."""
    rows = [
        row for row in cells if row["status"] == "ok" and len(row["peak_memory_bytes_by_rank"]) > 1
    ]
    return sorted(rows, key=imbalance, reverse=True)


def imbalance(row: Row) -> float:
    """Largest over mean peak of the ranks, in the trial with the largest."""
    peaks = row["peak_memory_bytes_by_rank"]
    return float(max(peaks) / statistics.fmean(peaks))


def ranks(cells: Sequence[Row]) -> Ranks | None:
    """The peaks of all ranks, of the cells that are most uneven."""
    rows = _of_ranks(cells)
    if not rows:
        return None
    main = main_workload(cells)
    lines = []
    for row in rows[:MOST_UNEVEN]:
        peaks = row["peak_memory_bytes_by_rank"]
        mean = statistics.fmean(peaks)
        lines.append(
            (
                where(row, main),
                tuple(peak / mean * 100 for peak in peaks),
                f"{number(imbalance(row))} · {number(max(peaks) / MIB)} MiB",
            )
        )
    words = "; ".join(f"{label} {text}" for label, _, text in lines[:5])
    summary = (
        "Peak memory of each rank in % of the mean of its cell, and in words the largest over the"
        f" mean and the largest: {words}"
    )
    axis = "peak of each rank (% of the mean of the cell’s ranks)"
    notes = ("right: largest over mean, largest", *rest(len(rows), MOST_UNEVEN))
    return Ranks(
        "ranks",
        "Peak of each rank, the most uneven cells first",
        axis,
        tuple(lines),
        summary,
        notes,
    )


def ranks_table(cells: Sequence[Row]) -> Grid | None:
    """The same of all cells, in MiB."""
    columns = [
        Column("Workload", "", "", word("workload")),
        *device_columns(_of_ranks(cells)),
        Column(
            "Uneven",
            "largest / mean",
            "",
            lambda row: Td((Part(number(imbalance(row)), "imbalance", exact(imbalance(row))),)),
        ),
        Column("Peaks", "MiB, in the order of ranks", "in the trial with the largest", _peaks),
    ]
    return grid("ranks-table", "Peak memory of each rank", _of_ranks(cells), columns)


def _peaks(row: Row) -> Td:
    return Td(
        (Part(", ".join(number(peak / MIB) for peak in row["peak_memory_bytes_by_rank"])),),
        kind="word",
    )
