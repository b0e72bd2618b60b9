"""Cells -> the data of the figures made of lines: scaling and losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.setting import SCALED, batch, series, setting
from reports.data import notes_for
from reports.groups import Row, marks, named, unit
from reports.text import missing, number, plural

COLOURED = 6


@dataclass(frozen=True)
class ScalingLine:
    label: str
    devices: tuple[int, ...]
    values: tuple[float, ...]
    lows: tuple[float | None, ...]
    highs: tuple[float | None, ...]
    marked: bool


@dataclass(frozen=True)
class Scaling:
    """Throughput over number of devices; the ideal is the fastest on the fewest devices times their
    number."""

    name: str
    title: str
    unit: str
    lines: tuple[ScalingLine, ...]
    ideal: tuple[tuple[int, float], ...]
    summary: str
    notes: tuple[str, ...]


def scaling(records: Sequence[Row], regime: str) -> list[Scaling]:
    """One figure per workload, precision and batch; only what ran on two or more numbers of
    devices."""
    curves: dict[tuple[object, ...], dict[int, Row]] = {}
    for row in sorted(
        records, key=lambda row: int(row["nodes"])
    ):  # of as many devices, those on fewest nodes
        fits = (
            row["regime"] == regime or row["devices"] == 1
        )  # on one device both regimes are the same
        if row["ranked"] and fits and missing(row.get("links")):
            key = (*setting(row, SCALED), *series(row), batch(row | {"regime": regime}))
            curves.setdefault(key, {}).setdefault(int(row["devices"]), row)
    figures: dict[tuple[object, ...], list[list[Row]]] = {}
    for by_devices in curves.values():
        rows = [by_devices[n] for n in sorted(by_devices)]
        if len(rows) > 1:
            first = rows[0]
            shared = (*setting(first, SCALED), batch(first | {"regime": regime}))
            figures.setdefault(shared, []).append(rows)
    found = sorted(figures.items(), key=lambda item: -len(item[1]))
    return [
        _scaling(f"{regime}-{i}", regime, size, lines)
        for i, ((*_, size), lines) in enumerate(found)
    ]


def _scaling(name: str, regime: str, size: object, curves: list[list[Row]]) -> Scaling:
    flat = [row for rows in curves for row in rows]
    column = (
        "samples_per_second"
        if any(missing(row["tokens_per_second"]) for row in flat)
        else "tokens_per_second"
    )
    lines = []
    for rows in curves:
        ends = [
            tuple(None if missing(row[column + end]) else float(row[column + end]) for row in rows)
            for end in ("_low", "_high")
        ]
        values = tuple(float(row[column]) for row in rows)
        last = {**rows[-1], "nodes": 1}  # a curve may go from one node to several
        label = named(last) if regime == "strong" else named(last).replace(" · weak", "")
        lines.append(
            ScalingLine(
                label,
                tuple(int(r["devices"]) for r in rows),
                values,
                ends[0],
                ends[1],
                any(marks(row) for row in rows),
            )
        )
    lines.sort(key=lambda line: (-line.devices[-1], -line.values[-1]))
    start = min(line.devices[0] for line in lines)
    base = max(line.values[0] for line in lines if line.devices[0] == start)
    counts = sorted({n for line in lines for n in line.devices})
    ideal = tuple((n, base * n / start) for n in counts)
    first = flat[0]
    held = f"batch {size} in all" if regime == "strong" else f"batch {size} per device"
    sgd = "" if first["optimizer"] == "adamw" else f" · {first['optimizer']}"
    title = (
        f"{regime.capitalize()} scaling · {first['workload']} · {first['precision']} · {held}{sgd}"
    )
    words = "; ".join(
        f"{line.label} {number(line.values[0])} to {number(line.values[-1])} {unit(column)}"
        for line in lines[:6]
    )
    summary = (
        f"{title}, {plural(len(lines), 'line')} over {counts[0]} to {counts[-1]} devices: {words}"
    )
    return Scaling(name, title, unit(column), tuple(lines), ideal, summary, notes_for(flat))


@dataclass(frozen=True)
class Losses:
    """Loss of each step of the parity segment: the reference's and each cell's that was held to
    it."""

    name: str
    title: str
    reference: tuple[float, ...]
    kept: tuple[tuple[float, ...], ...]
    diverged: tuple[tuple[str, tuple[float, ...]], ...]
    summary: str


def losses(records: Sequence[Row]) -> list[Losses]:
    """One figure per reference, the one with most cells first.

    A loss that is not finite ends its curve.
    """
    by_reference: dict[tuple[float, ...], list[Row]] = {}
    for row in records:
        reference = row.get("reference_losses")
        if reference is None or isinstance(reference, float) or not len(reference):
            continue
        by_reference.setdefault(tuple(float(x) for x in reference), []).append(row)
    found = []
    for index, (reference, rows) in enumerate(
        sorted(by_reference.items(), key=lambda item: -len(item[1]))
    ):
        away = [
            (f"{row['label']} {row['precision']}", _curve(row, len(reference)))
            for row in rows
            if row["parity_verdict"] == "diverged"
        ]
        kept = tuple(
            _curve(row, len(reference)) for row in rows if row["parity_verdict"] != "diverged"
        )
        first = rows[0]
        title = f"{first['workload']} · batch {first['global_batch']} · {first['optimizer']}"
        summary = (
            f"Loss over {plural(len(reference), 'step')}, {title}: the reference goes from"
            f" {number(reference[0])} to {number(reference[-1])}; {plural(len(kept), 'cell')} agree"
            f" with it, {len(away)} diverged"
        )
        found.append(Losses(f"loss-{index}", title, reference, kept, tuple(away), summary))
    return found


def _curve(row: Row, steps: int) -> tuple[float, ...]:
    values = []
    for value in list(row["losses"])[:steps]:
        if value is None or not math.isfinite(value):
            break
        values.append(float(value))
    return tuple(values)
