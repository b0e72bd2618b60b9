"""Prints a run's cells and how long they take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.cli.terminal import duration

if TYPE_CHECKING:
    from bench.host import Host
    from harness.record.plan import Plan
    from harness.record.store import Store, TrialKey
    from harness.run.allocation import PlannedHeadline
    from harness.run.expected import References
    from harness.spec.cell import Cell


def show(
    out: Console,
    store: Store,
    planned: Plan,
    todo: Sequence[tuple[int, Cell, TrialKey]],
    host: Host,
) -> tuple[dict[str, float], References]:
    """Prints the plan for this `host`; returns expected seconds by cell id, and the references."""
    from harness.host.cores import oversubscribed
    from harness.run.expected import expected_seconds, references_of
    from harness.spec.link import over

    seconds = expected_seconds(
        store, planned.cells, host.cores, host.name, planned.timed_seconds_of
    )
    table = Table(title=_title(planned), title_justify="left")
    for column, justify in (
        ("strategy", "left"),
        ("workload", "left"),
        ("devices", "right"),
        ("precision", "left"),
        ("batch", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    table.add_column("expected", justify="right")
    for cell in planned.cells:
        crowded = oversubscribed(cell, host.cores and cell.nodes * host.cores)
        devices = f"{cell.devices}{' (more than cores)' if crowded else ''}"
        devices += f" on {cell.nodes} nodes" if cell.nodes > 1 else ""
        devices += f" {over(cell.links)}" if cell.links else ""
        batch = f"{cell.global_batch}{' weak' if cell.regime == 'weak' else ''}"
        each = f"{planned.trials_of(cell)} x {seconds[cell.id]:.1f} s"
        table.add_row(
            escape(cell.label), escape(cell.workload), devices, cell.precision, batch, each
        )
    out.print(table)
    for absent in planned.left_out:
        out.print(
            f"[yellow]left out[/yellow] {escape(absent.cell.name)}: {absent.status}:"
            f" {escape(absent.reason)}"
        )
    references = references_of([cell for _, cell, _ in todo], host.cores, host.name)
    total = sum(seconds[cell.id] for _, cell, _ in todo) + 4
    disk = f"{references.kept_bytes / 2**30:.1f} GiB of disk"
    out.print(f"{len(todo)} trials to run, about {duration(total)}")
    out.print(
        f"{references.number} reference runs, where none is kept: {duration(references.seconds)},"
        f" {disk}"
    )
    out.print(f"in all about {duration(total + references.seconds)}")
    return seconds, references


def show_headline(out: Console, planned: Plan, headline: PlannedHeadline | None) -> None:
    """Prints which cells the run's answer is about, and its baseline."""
    if headline is None:
        return
    cell, baseline = headline.cells[0], headline.baseline
    against = "no baseline"
    if baseline is not None:
        against = f"baseline {baseline.label}, {planned.trials_of(baseline)} trials"
    out.print(
        f"headline: {cell.workload} · {cell.device} x{cell.devices} · {cell.precision} · batch"
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
    """Prints the sources of the predicted times."""
    from harness.run.expected import CONTEXT_SECONDS, CPU, GPU

    inputs = (
        dataclasses.asdict(GPU) | {"context_seconds": CONTEXT_SECONDS}
        if device == "cuda"
        else dataclasses.asdict(CPU)
    )
    out.print(
        "predicted from: "
        + ", ".join(f"{name} {value:g}" for name, value in inputs.items())
        + " (docs/hosts.md)"
    )


def _title(planned: Plan) -> str:
    timed = (
        f"matrix {escape(planned.matrix)}: {len(planned.cells) - len(planned.once)} cells x"
        f" {planned.trials} trials"
    )
    return timed + (f", and {len(planned.once)} launched once, for parity" if planned.once else "")
