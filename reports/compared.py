"""Cells that differ in one thing: who wraps DDP, and which variant of a model is trained."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.setting import SETTING, setting
from reports.data import Bars, throughput_bars
from reports.groups import Group, Row, by_setting, marks, ranking
from reports.states import Stacks, stacked
from reports.table import Column, Grid, Part, Td, figure, grid, mebibytes, throughput_column
from reports.text import DASH, deviation, exact, missing, number, percent, plain, scaled


@dataclass(frozen=True)
class Wrappers:
    """The same DDP mathematics under several libraries."""

    title: str
    bars: Bars
    grid: Grid


def wrappers(cells: Sequence[Row]) -> list[Wrappers]:
    """A comparison for each setting in which several cells wrap DDP."""
    rows = [row for row in cells if row["ranked"] and isinstance(row.get("wraps_ddp"), str)]
    groups = [group for group in by_setting(rows, "micro_batches", "regime") if len(group.rows) > 1]
    return [_wrappers(ranking(group), f"wrappers-{index}") for index, group in enumerate(groups)]


def _wrappers(group: Group, name: str) -> Wrappers:
    sizes = Counter(row["wraps_ddp"] for row in group.rows)
    labels = [
        row["wraps_ddp"] if sizes[row["wraps_ddp"]] == 1 else f"{row['wraps_ddp']}: {row['label']}"
        for row in group.rows
    ]
    drawn = dataclasses.replace(
        group,
        rows=tuple(row | {"label": label} for row, label in zip(group.rows, labels, strict=True)),
    )
    title = f"{group.workload} · {group.title}"
    bars = throughput_bars(drawn, name)
    fastest = group.rows[0]
    rows = [row | against(row, fastest) for row in group.rows]
    columns = [
        Column("Wrapper", "", "", _wrapper),
        throughput_column(rows),
        Column(
            "Step p50",
            "ms",
            "median, slowest rank",
            figure("step_seconds_p50", lambda v: scaled(v, 1e3)),
        ),
        Column(
            "Step time",
            "x fastest",
            "median over trials, over that of the fastest here",
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
    made = grid(f"{name}-table", f"What each wrapper costs, {title}", rows, columns)
    assert made is not None
    return Wrappers(title, dataclasses.replace(bars, title=title), made)


def against(row: Row, fastest: Row) -> Row:
    """Step time over the fastest's, and the seconds beyond it; by the median throughput over
    trials, as ranked."""
    own, best = (
        float(one["global_batch"]) / float(one["samples_per_second"]) for one in (row, fastest)
    )
    return {"step_ratio": own / best, "extra_seconds": own - best}


def _wrapper(row: Row) -> Td:
    return Td((Part(f"{row['wraps_ddp']}{marks(row)}"),), kind="word")


def _extra(row: Row) -> Td:
    shown = "0" if row["extra_seconds"] == 0 else scaled(row["extra_seconds"], 1e3)
    alike = " ≈" if row["same_as_above"] else ""
    parts = (
        Part(shown, "extra_seconds", exact(row["extra_seconds"])),
        *((Part(alike),) if alike else ()),
    )
    return Td(parts, tip="cannot be told apart from the one above" if alike else "")


@dataclass(frozen=True)
class Variants:
    """A model and its variants, trained by the same strategy in the same setting."""

    title: str
    stacks: Stacks | None
    grid: Grid


def variants(cells: Sequence[Row]) -> list[Variants]:
    """A comparison for each strategy and setting in which a variant (`base+suffix`) ran, the one
    with most of them first."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in cells:
        if row["status"] == "ok":
            base = str(row["workload"]).partition("+")[0]
            found.setdefault(
                (base, str(row["label"]), str(row["regime"]), *setting(row, without=["workload"])),
                [],
            ).append(row)
    kept = [rows for rows in found.values() if any("+" in str(row["workload"]) for row in rows)]
    kept.sort(key=lambda rows: -len(rows))
    return [_variants(rows, f"variants-{index}") for index, rows in enumerate(kept)]


def _variants(rows: Sequence[Row], name: str) -> Variants:
    rows = sorted(
        rows,
        key=lambda row: (
            "+" in str(row["workload"]),
            -float(row["trained_parameters"] or 0),
            str(row["workload"]),
        ),
    )
    first = rows[0]
    group = Group({key: first[key] for key in SETTING}, tuple(rows))
    title = f"{str(first['workload']).partition('+')[0]} · {first['label']} · {group.title}"
    columns = [
        Column("Trained", "parameters", "", figure("trained_parameters", plain)),
        Column("Of all", "", "", _share),
        Column("Parameters", "MiB", "fullest rank, between steps", mebibytes("parameter_bytes")),
        Column("Optimizer", "MiB", "fullest rank, between steps", mebibytes("optimizer_bytes")),
        Column("Library", "MiB", "fullest rank, between steps", mebibytes("library_bytes")),
        Column("Sent", "MiB per step", "by the rank that sends most", _sent),
        Column("Peak memory", "MiB", "fullest device", mebibytes("peak_memory_bytes")),
        throughput_column(rows),
        Column(
            "Distance to fp32",
            "relative",
            "largest loss deviation from the same training in fp32",
            figure("fp32_loss_deviation", deviation),
        ),
    ]
    made = grid(f"{name}-table", f"Variants of a model, {title}", rows, columns)
    assert made is not None
    known = [row for row in rows if not missing(row.get("state_bytes"))]
    drawn = (
        stacked(known, name, title, lambda row: f"{row['workload']}{marks(row)}")
        if len(known) > 1
        else None
    )
    return Variants(title, drawn, made)


def _share(row: Row) -> Td:
    known = not missing(row["trained_parameters"]) and not missing(row["parameters"])
    share = row["trained_parameters"] / row["parameters"] if known else None
    text = (
        DASH if share is None else percent(share) if share >= 0.1 else f"{number(share * 100, 2)} %"
    )
    return Td((Part(text, "trained_share", exact(share)),))


def _sent(row: Row) -> Td:
    if row["devices"] < 2:
        return Td((Part(DASH, "", ""),))
    return mebibytes("sent_bytes_per_step")(row)
