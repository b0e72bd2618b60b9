"""Cells -> the data of each figure: everything a picture shows, before anything is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reports.groups import (
    OVERSUBSCRIBED,
    STAND_IN,
    Group,
    Row,
    marks,
    named,
    pareto,
    tied_with_fastest,
)
from reports.text import MIB, deviation, missing, number, percent, plural, shortened

MOST_ROWS, MOST_DEVIATIONS = 60, 20
LABEL = 52  # characters that fit the width of a chart
NOTES = {
    STAND_IN: f"{STAND_IN} hatched: a stand-in ran instead of the real thing",
    OVERSUBSCRIBED: (
        f"{OVERSUBSCRIBED} hatched: more ranks than cores, its times say nothing of real hardware"
    ),
}
ALIKE = "≈ cannot be told apart from the one above: no difference is seen within rounds"


@dataclass(frozen=True)
class Bar:
    """One line of a chart of bars or dots; values in the chart's unit."""

    label: str
    value: float | None
    text: str
    low: float | None = None
    high: float | None = None
    strong: bool = False
    """One of the best."""
    marks: str = ""
    target: float | None = None
    """Theory, or tolerance."""
    failed: bool = False


@dataclass(frozen=True)
class Bars:
    name: str
    """Unique in the page, fit for an HTML id."""
    title: str
    axis: str
    """What is drawn, with its unit."""
    bars: tuple[Bar, ...]
    summary: str
    """What a screen reader says."""
    notes: tuple[str, ...] = ()
    logarithmic: bool = False
    target: str = ""
    """What `Bar.target` is."""


@dataclass(frozen=True)
class Point:
    """Memory in MiB and throughput of one cell; `place` numbers the Pareto front from its fastest
    end."""

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


def _known(value: Any, factor: float = 1.0) -> float | None:
    return None if missing(value) else float(value) * factor


def notes_for(rows: Sequence[Row]) -> tuple[str, ...]:
    """The legend of the marks that occur."""
    seen = "".join(marks(row) for row in rows)
    return tuple(text for mark, text in NOTES.items() if mark in seen)


def rest(total: int, most: int = MOST_ROWS) -> tuple[str, ...]:
    """What is not drawn."""
    return (f"the first {most} of {total}; all are in the table",) if total > most else ()


def throughput_bars(group: Group, name: str) -> Bars:
    """Throughput of a group, fastest first, with the 95 % intervals; strong: cannot be told apart
    from the fastest."""
    best = {id(group.rows[0]), *(id(row) for row in tied_with_fastest(group))}
    bars = []
    for row in group.rows[:MOST_ROWS]:
        value, low, high = (row[group.throughput + end] for end in ("", "_low", "_high"))
        spread = "" if missing(low) else f" ± {number((high - low) / 2, 2)}"
        text = number(value) + spread + (" ≈" if row["same_as_above"] else "")
        bars.append(
            Bar(
                named(row),
                _known(value),
                text,
                _known(low),
                _known(high),
                id(row) in best,
                marks(row),
            )
        )
    alike = (ALIKE,) if any(row["same_as_above"] for row in group.rows) else ()
    return Bars(
        name,
        group.title,
        f"throughput ({group.unit}), 95 % interval",
        tuple(bars),
        f"Throughput of {plural(len(group.rows), 'cell')}, {group.title}, fastest first: "
        + "; ".join(f"{bar.label} {bar.text} {group.unit}" for bar in bars[:5]),
        alike + notes_for(group.rows) + rest(len(group.rows)),
    )


def memory_bars(group: Group, name: str) -> Bars | None:
    """Peak memory of a group in MiB, smallest first, with the range over trials."""
    rows = sorted(
        (r for r in group.rows if not missing(r["peak_memory_bytes"])),
        key=lambda r: float(r["peak_memory_bytes"]),
    )
    if not rows:
        return None
    bars = []
    for row in rows[:MOST_ROWS]:
        peak, low = row["peak_memory_bytes"] / MIB, row["peak_memory_bytes_low"] / MIB
        strong = row["peak_memory_bytes_low"] <= rows[0]["peak_memory_bytes"]
        bars.append(
            Bar(
                named(row),
                peak,
                number(peak),
                low if row["trials"] > 1 else None,
                peak,
                strong,
                marks(row),
            )
        )
    return Bars(
        name,
        group.title,
        "peak memory of the fullest device (MiB), range over trials",
        tuple(bars),
        f"Peak memory of {plural(len(rows), 'cell')}, {group.title}, smallest first: "
        + "; ".join(f"{bar.label} {bar.text} MiB" for bar in bars[:5]),
        notes_for(rows) + rest(len(rows)),
    )


def memory_scatter(group: Group, name: str) -> Scatter | None:
    """Memory against throughput with the Pareto front; None below three cells."""
    rows = [row for row in group.rows if not missing(row["peak_memory_bytes"])]
    if len(rows) < 3:
        return None
    front = {id(row): place for place, row in enumerate(pareto(group), 1)}
    points = [
        Point(
            named(row),
            row["peak_memory_bytes"] / MIB,
            row["peak_memory_bytes_low"] / MIB,
            float(row[group.throughput]),
            _known(row[f"{group.throughput}_low"]),
            _known(row[f"{group.throughput}_high"]),
            marks(row),
            front.get(id(row)),
        )
        for row in rows
    ]
    words = "; ".join(
        f"{p.label} {number(p.throughput)} {group.unit} in {number(p.memory)} MiB"
        for p in points
        if p.place
    )
    summary = (
        f"Peak memory against throughput, {group.title}. No other cell is better in both than:"
        f" {words}"
    )
    return Scatter(name, group.title, group.unit, tuple(points), summary, notes_for(rows))


def where(row: Row, workload: str) -> str:
    """A cell in words where a chart mixes settings: `label x2 bf16`, and its workload if it is
    another one."""
    other = "" if row["workload"] == workload else f" {row['workload']}"
    setting = f" x{row['devices']} {row['precision']}{other}"
    return shortened(named(row), max(12, LABEL - len(setting))) + setting


def main_workload(rows: Sequence[Row]) -> str:
    """The workload of most cells."""
    return Counter(str(row["workload"]) for row in rows).most_common(1)[0][0]


def deviation_bars(
    records: Sequence[Row], column: str, tolerance: str, name: str, title: str
) -> Bars | None:
    """The largest deviation of each judged cell on a log axis with its tolerance, those nearest to
    theirs first."""
    judged = [row for row in records if not missing(row.get(tolerance))]
    if not judged:
        return None

    def used(row: Row) -> tuple[bool, float]:
        share = float("inf") if missing(row[column]) else float(row[column]) / float(row[tolerance])
        return row["parity_verdict"] == "diverged", share

    judged.sort(key=used, reverse=True)
    main = main_workload(records)
    bars = []
    for row in judged[:MOST_DEVIATIONS]:
        failed = row["parity_verdict"] == "diverged"
        text = "not finite" if missing(row[column]) else deviation(row[column])
        bars.append(
            Bar(
                where(row, main),
                _known(row[column]),
                text,
                marks=marks(row),
                target=float(row[tolerance]),
                failed=failed,
            )
        )
    outside = sum(bar.failed for bar in bars)
    summary = f"{title} of {plural(len(judged), 'cell')} against its tolerance; {outside} diverged"
    axis, notes = "relative deviation (no unit), log scale", rest(len(judged), MOST_DEVIATIONS)
    return Bars(name, title, axis, tuple(bars), summary, notes, True, "tolerance")


def bubble_theory(row: Row) -> float:
    """(p - 1) / (m + p - 1) for p stages and m micro-batches (Huang et al., arXiv 1811.06965)."""
    stages, parts = int(row["pipeline_parallel"]), int(row["micro_batches"])
    return (stages - 1) / (parts + stages - 1)


def bubble_bars(records: Sequence[Row], name: str) -> Bars | None:
    """Measured pipeline bubble in % with the theory's, smallest first."""
    rows = [
        row
        for row in records
        if not missing(row.get("bubble_fraction")) and (row["pipeline_parallel"] or 0) > 1
    ]
    if not rows:
        return None
    rows.sort(key=lambda r: float(r["bubble_fraction"]))
    main = main_workload(records)
    bars = []
    for row in rows[:MOST_ROWS]:
        share, theory = float(row["bubble_fraction"]), bubble_theory(row)
        text = f"{percent(share)} ({percent(theory)})"
        bars.append(Bar(where(row, main), share * 100, text, marks=marks(row), target=theory * 100))
    summary = "Pipeline bubble, measured and in brackets by theory: " + "; ".join(
        f"{bar.label} {bar.text}" for bar in bars[:8]
    )
    notes = notes_for(rows) + rest(len(rows))
    return Bars(
        name,
        "Share of stage time spent waiting",
        "bubble (% of stage time), in brackets the theory's",
        tuple(bars),
        summary,
        notes,
        False,
        "theory",
    )
