"""The largest trainable model of each strategy within a budget of memory, against what the formula
predicts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reports.data import Bar, Bars
from reports.groups import Row
from reports.table import Column, Grid, TableRow, figure, mebibytes, word
from reports.text import missing, number, plain, size

if TYPE_CHECKING:
    import pandas as pd

    from harness.analysis.maxsize import MaxsizeResult
    from harness.record.store import Results

MATRIX = "maxsize"
MILLION = 1e6


@dataclass(frozen=True)
class Largest:
    """What a search found."""

    budget: str
    winner: Row | None
    bars: Bars
    grid: Grid
    order: tuple[str, ...]
    """A sentence for each chain of strategies that theory puts in an order."""
    limits: tuple[tuple[str, str], ...]
    """Strategy, and what it ran out of memory with, or why it has no size."""
    probes: int


def is_search(run: Row) -> bool:
    """Whether the run is a search whose trials are probes."""
    return bool(run["matrix"] == MATRIX)


def verified(trials: pd.DataFrame) -> pd.DataFrame:
    """A search's trials without its probes, which only say whether a size fits; those that failed
    otherwise are kept."""
    return trials[(trials["trial"] == 1) | ~trials["status"].isin(["ok", "out_of_memory"])]


def largest(results: Results) -> Largest | None:
    """The section of a search, None for any other run and for one whose plan another version
    wrote."""
    from harness.analysis.maxsize import found, limits, order_notes
    from harness.record.plan import Plan

    try:
        plan = Plan.from_row(results.runs.iloc[0].to_dict())
        rows = found(results) if plan.search else []
    except (KeyError, TypeError, ValueError):
        return None
    if not rows or plan.search is None:
        return None
    devices = {cell.label: cell for cell in plan.cells}
    lines = [_row(one, devices.get(one.label)) for one in rows]
    told = [
        (one.label, f"{one.status}: {one.reason}" if one.reason else limits(one)) for one in rows
    ]
    chains = [
        sentence for chain in plan.search["order"] if (sentence := order_sentence(rows, chain))
    ]
    reached = [line for line in lines if line["reached"]]
    return Largest(
        size(plan.search["budget"]),
        max(reached, key=lambda line: line["reached"], default=None),
        bars(lines),
        table(lines),
        (*chains, *order_notes(rows, plan.search["order"])),
        tuple((label, text) for label, text in told if text),
        sum(one.probes for one in rows),
    )


def _row(one: MaxsizeResult, cell: Any) -> Row:
    return {
        "cell_id": (
            cell.model_copy(update={"workload": one.workload}).id if cell and one.parameters else ""
        ),
        "label": one.label,
        "workload": one.workload,
        "status": one.status,
        "devices": cell.devices if cell else None,
        "reached": one.parameters,
        "next": one.next_parameters,
        "predicted": one.predicted,
        "ratio": one.ratio,
        "step": one.step,
        "peak_memory_bytes": one.peak_memory_bytes,
        "setup_peak_memory_bytes": one.setup_peak_memory_bytes,
        "state_bytes": sum(one.kept.values()) if one.kept else None,
        "failed_in": one.failed_in,
        "parity_verdict": one.parity,
        # what the name of a cell is made of
        "nodes": 1,
        "links": None,
        "regime": "strong",
        "stand_in": None,
        "oversubscribed": False,
        "samples_per_second": None,
    }


def order_sentence(rows: Sequence[MaxsizeResult], chain: Sequence[str]) -> str:
    """`As theory has it: a 10.0M < b 20.0M`; empty below two strategies with a size."""
    by_label = {row.label: row for row in rows if row.parameters}
    present = [by_label[label] for label in chain if label in by_label]
    if len(present) < 2:
        return ""
    kept = all(
        (more.parameters or 0) > (less.parameters or 0)
        for less, more in itertools.pairwise(present)
    )
    measured = sorted(present, key=lambda row: row.parameters or 0)
    words = f"{measured[0].label} {measured[0].largest_model}"
    for less, more in itertools.pairwise(measured):
        words += (
            f" {'<' if less.parameters != more.parameters else '='} {more.label}"
            f" {more.largest_model}"
        )
    return (
        f"Measured, and in the order of theory: {words}"
        if kept
        else f"Measured: {words}; theory has {' < '.join(r.label for r in present)}"
    )


def bars(lines: Sequence[Row]) -> Bars:
    """Millions of parameters reached, most first, with the formula's as a mark."""
    ordered = sorted(lines, key=lambda line: -(line["reached"] or 0))
    best = ordered[0]["reached"]
    drawn = []
    for line in ordered:
        value, target = (
            None if not line[name] else line[name] / MILLION for name in ("reached", "predicted")
        )
        ratio = "" if missing(line["ratio"]) else f" ({number(line['ratio'])})"
        label = line["label"] if missing(line["devices"]) else f"{line['label']} x{line['devices']}"
        text = f"{number(value)}M{ratio}" if value else str(line["status"])
        drawn.append(
            Bar(
                label,
                value,
                text,
                strong=bool(value) and line["reached"] == best,
                target=target,
                failed=not value and line["status"] != "unfinished",
            )
        )
    words = "; ".join(f"{bar.label} {bar.text}" for bar in drawn)
    summary = (
        "Largest trainable model in millions of parameters, in brackets over the formula's:"
        f" {words}"
    )
    axis = "millions of parameters; in brackets: over the formula's"
    return Bars(
        "largest", "Reached, and by the formula", axis, tuple(drawn), summary, (), False, "formula"
    )


def table(lines: Sequence[Row]) -> Grid:
    columns = (
        Column("Ranks", "", "", figure("devices", plain)),
        Column("Reached", "parameters", "the largest model that trains", figure("reached", plain)),
        Column(
            "Too large", "parameters", "the smallest model that does not", figure("next", plain)
        ),
        Column("Search step", "parameters", "of one block", figure("step", plain)),
        Column(
            "Formula",
            "parameters",
            "what states, and what a step needs beside them, allow",
            figure("predicted", plain),
        ),
        Column("Reached / formula", "", "", figure("ratio", number)),
        Column("Peak", "MiB", "fullest rank", mebibytes("peak_memory_bytes")),
        Column("Set-up peak", "MiB", "before the first step", mebibytes("setup_peak_memory_bytes")),
        Column("States", "MiB", "fullest rank, between steps", mebibytes("state_bytes")),
        Column("Runs out in", "", "", word("failed_in")),
        Column("Parity", "", "", word("parity_verdict")),
        Column("Search", "", "", word("status")),
    )
    rows = tuple(
        TableRow(line, tuple(column.make(line) for column in columns), ()) for line in lines
    )
    return Grid("largest-table", f"Largest trainable model, {len(rows)} strategies", columns, rows)
