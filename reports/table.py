"""The full table: every cell, every number with its full-precision value for machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.analysis.disturbance import CAUSES
from reports.groups import DISTURBED, Group, Row, unit
from reports.text import (
    DASH,
    MIB,
    deviation,
    exact,
    missing,
    number,
    percent,
    plain,
    plural,
    scaled,
)

_FINDINGS = 3
"""Findings on a cell's GPUs that are said in its row."""
STATUS = {
    "failed": "failed",
    "timeout": "passed its time limit",
    "out_of_memory": "out of memory",
    "diverged": "trained something else",
    "interrupted": "interrupted",
    "unavailable": "not available here",
    "refused": "cannot exist",
    "skipped": "skipped",
    "ok": "ok",
}


@dataclass(frozen=True)
class Part:
    """A piece of a table cell; `field` names the frame's column where the piece is a number of
    it."""

    text: str
    field: str = ""
    value: str = ""


@dataclass(frozen=True)
class Td:
    parts: tuple[Part, ...]
    kind: str = "number"
    tip: str = ""


@dataclass(frozen=True)
class Flag:
    """A caution about a cell: a word and what it means for this cell."""

    word: str
    meaning: str


@dataclass(frozen=True)
class Column:
    title: str
    unit: str
    tip: str
    make: Callable[[Row], Td]


@dataclass(frozen=True)
class Grid:
    """A small table of cells; columns in which nothing is known are left out."""

    name: str
    """Unique in the page, fit for an HTML id."""
    label: str
    """What a screen reader says."""
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]


@dataclass(frozen=True)
class TableRow:
    row: Row
    cells: tuple[Td, ...]
    flags: tuple[Flag, ...]


def flags(row: Row) -> tuple[Flag, ...]:
    """All cautions that a reader of this cell must know."""
    found = []
    if not missing(row["stand_in"]):
        found.append(Flag("stand-in", str(row["stand_in"])))
    if row["oversubscribed"] and not missing(row["samples_per_second"]):
        found.append(
            Flag("oversubscribed", "more ranks than cores: its times say nothing of real hardware")
        )
    if row["disturbed"]:
        said = f"{disturbance(row)} of {plural(row['trials'], 'trial')}"
        found.append(Flag(f"{DISTURBED} disturbed", said + gpu_findings(row)))
    if not missing(row["trend"]) and row["trend"] != 0:
        found.append(
            Flag(
                "trend",
                f"warm-up was too short: steps still changed by {percent(row['trend'])} over the"
                " timed ones",
            )
        )
    if row["trials"] == 1 and row["status"] == "ok":
        found.append(Flag("1 trial: no interval", ""))
    if row["expected"] and row["status"] == "diverged":
        found.append(Flag("expected to diverge", "the matrix says so: no failure"))
    return tuple(found)


def disturbance(row: Row) -> str:
    """What disturbed how many of its trials, in words; empty where nothing did."""
    causes = row.get("disturbed_by") or {}
    return "; ".join(f"{CAUSES[cause]} {count}" for cause, count in causes.items())


def gpu_findings(row: Row) -> str:
    """What was found on its GPUs: the first few, in words; empty where nothing was."""
    words = row.get("gpu_findings") or ()
    more = f", and {len(words) - _FINDINGS} more" if len(words) > _FINDINGS else ""
    return f" ({'; '.join(words[:_FINDINGS])}{more})" if words else ""


def disturbance_legend(rows: Sequence[Row]) -> str:
    """What the mark means on a page with these cells; empty where none has it."""
    seen = {cause for row in rows for cause in row.get("disturbed_by") or {}}
    return "; or ".join(
        f"{words} some of its trials" for cause, words in CAUSES.items() if cause in seen
    )


def figure(field: str, text: Callable[[Any], str], tip: str = "") -> Callable[[Row], Td]:
    """Makes a table cell of a column of the frame; a column that the row lacks is unknown."""
    return lambda row: Td((Part(text(row.get(field)), field, exact(row.get(field))),), tip=tip)


def mebibytes(field: str) -> Callable[[Row], Td]:
    """A column of bytes in MiB."""
    return figure(
        field, lambda v: "< 0.001" if not missing(v) and 0 < v < MIB / 1000 else scaled(v, 1 / MIB)
    )


def word(field: str) -> Callable[[Row], Td]:
    """A column of text."""
    return lambda row: Td(
        (Part(DASH if missing(row.get(field)) else str(row[field])),), kind="word"
    )


def interval(row: Row, column: str, with_unit: bool) -> Td:
    """A figure with the interval around it."""
    value, low, high = (row[column + end] for end in ("", "_low", "_high"))
    parts = [Part(number(value), column, exact(value))]
    if with_unit and not missing(value):
        parts.append(Part(f" {unit(column)}"))
    if not missing(low):
        parts += [Part(" ["), Part(number(low), f"{column}_low", exact(low)), Part(", ")]
        parts += [Part(number(high), f"{column}_high", exact(high)), Part("]")]
    return Td(tuple(parts))


def _efficiency(row: Row) -> Td:
    own, reference = row["efficiency_own"], row["efficiency_single"]
    parts = [
        Part(percent(own), "efficiency_own", exact(own)),
        Part(" / "),
        Part(percent(reference), "efficiency_single", exact(reference)),
    ]
    return Td(tuple(parts))


def _place(row: Row) -> Td:
    if "place" not in row:
        return Td((Part(DASH, "place", ""),))
    parts = [Part(str(row["place"]), "place", str(row["place"]))]
    if row["same_as_above"]:
        parts.append(Part(f" ≈ {row['place'] - 1}"))
        return Td(
            tuple(parts),
            tip=(
                f"cannot be told apart from the one above, place {row['place'] - 1}: no difference"
                " seen"
            ),
        )
    return Td(tuple(parts))


def _parity(row: Row) -> Td:
    if row["status"] not in ("ok", "diverged"):
        return Td((Part(STATUS.get(row["status"], str(row["status"]))),), kind="bad")
    word = row["parity_verdict"]
    kind = {"exact": "good", "within tolerance": "good", "diverged": "bad"}.get(str(word), "word")
    reason = row.get("parity_reason")
    return Td(
        (Part(DASH if missing(word) else str(word)),),
        kind=kind,
        tip="" if missing(reason) else str(reason),
    )


def columns(rows: Sequence[Row]) -> list[Column]:
    """The columns that have something to show."""
    kept = [
        Column("Workload", "", "", word("workload")),
        *device_columns(rows),
        Column("Precision", "", "", word("precision")),
        Column("Batch", "samples", "global batch", _batch),
        Column(
            "Place",
            "",
            "within workload, devices, precision, batch and optimizer; ≈ cannot be told apart from"
            " the one above",
            _place,
        ),
        throughput_column(rows),
        Column(
            "Step p50",
            "ms",
            "median, slowest rank",
            figure("step_seconds_p50", lambda v: scaled(v, 1e3)),
        ),
        Column(
            "Step p95",
            "ms",
            "95th percentile, slowest rank",
            figure("step_seconds_p95", lambda v: scaled(v, 1e3)),
        ),
        Column(
            "Peak memory",
            "MiB",
            "fullest device, largest of the trials",
            figure("peak_memory_bytes", lambda v: scaled(v, 1 / MIB)),
        ),
        Column(
            "Imbalance",
            "max / mean",
            "largest over mean peak of the ranks",
            figure("memory_imbalance", number),
        ),
        Column(
            "Efficiency",
            "own / plain",
            "against itself, and against the plain process, on one device",
            _efficiency,
        ),
        Column("Parity", "or status", "is it the same training as the reference?", _parity),
        Column(
            "Loss deviation",
            "relative",
            "largest of any step",
            figure("parity_max_loss_deviation", deviation),
        ),
        Column(
            "Update deviation",
            "relative",
            "largest of any tensor",
            figure("parity_max_update_deviation", deviation),
        ),
        Column(
            "Set-up",
            "s",
            "process group, model, wrapping; slowest rank",
            figure("setup_seconds", number),
        ),
    ]
    if any(not missing(row.get("mfu")) for row in rows):
        kept.append(
            Column("MFU", "%", "model FLOPs utilisation", figure("mfu", lambda v: scaled(v, 100)))
        )
    return kept


def device_columns(rows: Sequence[Row]) -> list[Column]:
    """Number of devices, and of nodes where some row is of several."""
    found = [
        Column("Devices", "", "", figure("devices", plain)),
        Column("Nodes", "", "that the devices are on", figure("nodes", plain)),
    ]
    return found[
        : 2 if any(not missing(row.get("nodes")) and row["nodes"] > 1 for row in rows) else 1
    ]


def _throughput(row: Row) -> str:
    return "samples_per_second" if missing(row["tokens_per_second"]) else "tokens_per_second"


def _batch(row: Row) -> Td:
    size = Part(plain(row["global_batch"]), "global_batch", exact(row["global_batch"]))
    return Td((size, Part(" weak")) if row["regime"] == "weak" else (size,))


def table_rows(
    cells: Sequence[Row], groups: Sequence[Group], shown: Sequence[Column]
) -> list[TableRow]:
    """Ranked cells group by group, fastest first, then the others."""
    ranked = [row for group in groups for row in group.rows]
    seen = {row["cell_id"] for row in ranked}
    rest = [row for row in cells if row["cell_id"] not in seen]
    return [
        TableRow(row, tuple(column.make(row) for column in shown), flags(row))
        for row in [*ranked, *rest]
    ]


def grid(name: str, label: str, rows: Sequence[Row], columns: Sequence[Column]) -> Grid | None:
    """The rows as a table, None where there are none."""
    made = [[column.make(row) for row in rows] for column in columns]
    kept = [
        i for i, tds in enumerate(made) if any(td.parts[0].text not in (DASH, "") for td in tds)
    ]
    lines = tuple(
        TableRow(row, tuple(made[i][line] for i in kept), flags(row))
        for line, row in enumerate(rows)
    )
    return Grid(name, label, tuple(columns[i] for i in kept), lines) if rows else None


def throughput_column(rows: Sequence[Row]) -> Column:
    """Throughput with its interval; the unit in the heading where all rows have the same."""
    kinds = {_throughput(row) for row in rows if not missing(row["samples_per_second"])}
    same = kinds.pop() if len(kinds) == 1 else ""
    tip = "median and 95 % interval over trials"
    return Column(
        "Throughput",
        unit(same) if same else "",
        tip,
        lambda row: interval(row, same or _throughput(row), with_unit=not same),
    )


def efficiency(cells: Sequence[Row]) -> Grid | None:
    """Scaling efficiency of what ran on several devices and has something to compare with, best
    first."""
    rows = [
        r
        for r in cells
        if r["devices"] > 1
        and not (missing(r["efficiency_own"]) and missing(r["efficiency_single"]))
    ]
    rows.sort(
        key=lambda r: (
            r["workload"],
            r["devices"],
            -(r["efficiency_own"] if not missing(r["efficiency_own"]) else -1),
        )
    )
    columns = [
        Column("Workload", "", "", word("workload")),
        *device_columns(rows),
        Column("Scaling", "", "", word("regime")),
        Column("Precision", "", "", word("precision")),
        Column("Batch", "samples", "global batch", _batch),
        Column("Against itself", "on one device", "", figure("efficiency_own", percent)),
        Column(
            "Against the plain process", "on one device", "", figure("efficiency_single", percent)
        ),
    ]
    return grid("efficiency", "Scaling efficiency", rows, columns)
