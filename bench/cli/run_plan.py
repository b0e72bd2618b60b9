"""Prints the plan of bench run, and parses its options."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from bench.cli.terminal import duration, table
from harness.spec.text import plural

if TYPE_CHECKING:
    from bench.execution import Prepared
    from harness.record.plan import Plan
    from harness.run.allocation import PlannedHeadline


def show_plan(out: Console, prepared: Prepared) -> None:
    from harness.host.cores import oversubscribed
    from harness.spec.link import over

    planned, host, seconds = prepared.plan, prepared.host, prepared.seconds
    columns = ("strategy", "workload", "devices", "precision", "batch", "expected")
    rows = table(_title(planned), *columns, left=("workload", "precision"))
    for cell in planned.cells:
        crowded = oversubscribed(cell, host.cores and cell.nodes * host.cores)
        devices = f"{cell.devices}{' (more than cores)' if crowded else ''}"
        devices += f" on {cell.nodes} nodes" if cell.nodes > 1 else ""
        devices += f" {over(cell.links)}" if cell.links else ""
        batch = f"{cell.global_batch}{' weak' if cell.regime == 'weak' else ''}"
        duration_text = f"{planned.trials_of(cell)} x {seconds[cell.id]:.1f} s"
        rows.add_row(
            escape(cell.label),
            escape(cell.workload_name),
            devices,
            cell.precision,
            batch,
            duration_text,
        )
    out.print(rows)
    for absent in planned.left_out:
        out.print(
            f"[yellow]left out[/yellow] {escape(absent.cell.name)}: {absent.status}:"
            f" {escape(absent.reason)}"
        )
    references = prepared.references
    runs = plural(references.number, "reference run")
    disk = f"{references.kept_bytes / 2**30:.1f} GiB of disk"
    trials = plural(prepared.trials_to_run, "trial")
    out.print(f"{trials} to run, about {duration(prepared.total_seconds)}")
    out.print(f"{runs}, if none are cached: {duration(references.seconds)}, {disk}")
    out.print(f"about {duration(prepared.total_seconds + references.seconds)} in total")
    if planned.until_answered and planned.time_budget_seconds and prepared.part[1] == 1:
        out.print(
            "then more trials of cells that may still be the best of their setting in speed or"
            f" memory, until {duration(planned.time_budget_seconds)} have passed"
        )


def show_headline(out: Console, planned: Plan, headline: PlannedHeadline) -> None:
    cell, baseline = headline.cells[0], headline.baseline
    against = "no baseline"
    if baseline is not None:
        against = f"baseline {baseline.label}, {plural(planned.trials_of(baseline), 'trial')}"
    out.print(
        f"headline: {cell.workload_name} · {cell.device} x{cell.devices} · {cell.precision} · batch"
        f" {cell.global_batch}: {len(headline.candidates)} of {len(headline.cells)} cells may be"
        f" advised; {against}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def headline_as_json(headline: PlannedHeadline) -> dict[str, object]:
    fields = ("workload", "device", "devices", "nodes", "precision", "global_batch")
    return {
        **{name: getattr(headline.cells[0], name) for name in fields},
        "cells": len(headline.cells),
        "baseline_cell_id": headline.baseline and headline.baseline.id,
        "candidate_cell_ids": [cell.id for cell in headline.candidates],
    }


def show_inputs(out: Console, device: str) -> None:
    from harness.run.expected import CPU, GPU

    inputs = dataclasses.asdict(GPU if device == "cuda" else CPU)
    out.print(
        "predicted from: "
        + ", ".join(f"{name} {value:g}" for name, value in inputs.items())
        + " (docs/hosts.md)"
    )


def _title(planned: Plan) -> str:
    once = len(planned.not_compared)
    timed = (
        f"matrix {escape(planned.matrix)}: {plural(len(planned.cells) - once, 'cell')}"
        f" x {plural(planned.trials, 'trial')}"
    )
    return timed + (f", and {once} once, for parity" if once else "")
