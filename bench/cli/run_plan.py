"""The plan of bench run, resumed or new, and what it prints."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from bench.cli.terminal import duration, table
from bench.expand import expand
from bench.host import host_of
from bench.matrix import parse_changes, read_matrix
from harness.record.plan import Plan, kept_plan, resumable
from harness.record.store import Store, require_plain_name
from harness.run.allocation import launches_per_round, not_compared
from harness.spec.errors import UsageError

if TYPE_CHECKING:
    from bench.host import Host
    from harness.record.store import TrialKey
    from harness.run.allocation import PlannedHeadline
    from harness.run.expected import References
    from harness.spec.cell import Cell


@dataclass(frozen=True)
class PlanOptions:
    matrix: str
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    trials: int | None = None
    precision: str = ""
    time_budget: str = ""
    interleave: bool = False
    timed_seconds: float | None = None
    """Length of timed steps; None: the matrix's."""
    run_id: str = ""
    """Name of the run; empty: its time."""
    host: str = ""
    """Host to plan for; empty: this one."""
    nodes: int = 1

    @property
    def changes_a_plan(self) -> bool:
        """Returns whether an option cannot apply to a run that has begun."""
        return bool(
            self.only
            or self.skip
            or self.settings
            or self.trials
            or self.precision
            or self.interleave
            or self.timed_seconds is not None
        )


def kept_or_new_plan(store: Store, options: PlanOptions, resume: bool) -> tuple[Plan, bool]:
    """Returns the plan, and whether its run has begun; raises UsageError."""
    if options.run_id:
        require_plain_name(options.run_id)
    if options.run_id and options.run_id in store.run_ids():
        return kept_plan(store, options.run_id), True
    if resume:
        if options.changes_a_plan:
            raise UsageError(
                "--resume continues a run as it was planned: leave out --only, --skip, --set,"
                " --trials, --timed-seconds, --precision and --interleave"
            )
        return resumable(store, options.matrix or None), True
    if not options.matrix:
        raise UsageError(
            "--matrix is missing; try --matrix smoke, or see: python -m bench list matrices"
        )
    return _new_plan(options), False


def _new_plan(options: PlanOptions) -> Plan:
    matrix, host = read_matrix(options.matrix), host_of(options.host, options.nodes)
    expanded = expand(
        matrix,
        host,
        name=options.matrix,
        only=options.only,
        skip=options.skip,
        changes=parse_changes(options.settings),
    )
    plan = Plan.new(
        options.matrix,
        expanded.cells,
        options.trials or matrix.trials_on(host),
        expanded.left_out,
        options.run_id,
        expanded.once,
    )
    if options.precision:
        plan = dataclasses.replace(
            plan,
            precision=parse_precision(options.precision),
            time_budget_seconds=parse_time(options.time_budget or "1h"),
        )
    elif not options.trials and not options.interleave:
        budget = parse_time(options.time_budget) if options.time_budget else None
        if budget is None and matrix.time_budget_minutes:
            budget = matrix.time_budget_minutes * 60
        plan = dataclasses.replace(plan, until_answered=True, time_budget_seconds=budget)
    if not options.interleave:
        seconds = options.timed_seconds
        seconds = matrix.timed_seconds if seconds is None else seconds
        plan = dataclasses.replace(plan, timed_seconds=seconds)
        if seconds and plan.until_answered:
            timed = [cell for cell in plan.cells if cell.id not in plan.once]
            plan = dataclasses.replace(
                plan,
                not_compared=not_compared(timed, host.cores),
                launches_per_round=launches_per_round(timed, host.cores),
            )
    else:
        require_few(plan)
        plan = dataclasses.replace(plan, interleaved=True)
    return plan


def parse_share(text: str) -> tuple[int, int]:
    """Parses `1/4` to (1, 4): a share of cells, counted from 0, and their number. Raises
    UsageError."""
    match = re.fullmatch(r"(\d+)/(\d+)", text or "0/1")
    if not match or int(match[1]) >= int(match[2]):
        raise UsageError(f"--share {text!r} is not a share; the second of four is 1/4")
    return int(match[1]), int(match[2])


def parse_precision(text: str) -> float:
    """Parses `2%` to 0.02; raises UsageError outside 0 to 100 %."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if not match or not 0 < float(match[1]) < 100:
        raise UsageError(
            f"--precision {text!r} is not a precision; give a share of the throughput, like 2%"
        )
    return float(match[1]) / 100


def parse_time(text: str) -> float:
    """Parses `45min` to 2700.0 seconds; raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h)", text.strip())
    if not match or not float(match[1]):
        raise UsageError(
            f"--time-budget {text!r} is not a time; give a number with s, min or h, like 45min"
        )
    return float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]]


def require_few(plan: Plan) -> None:
    """Raises UsageError for cells that cannot be interleaved."""
    from harness.host.environment import gpus
    from harness.launch.interleaved import MOST_CELLS
    from harness.run.expected import too_large_together

    if not 2 <= len(plan.cells) <= MOST_CELLS:
        raise UsageError(
            f"--interleave is for 2 to {MOST_CELLS} cells, which are all in memory, not"
            f" {len(plan.cells)}; choose them with --only"
        )
    for cell in plan.cells:
        if cell.nodes > 1:
            raise UsageError(
                f"--interleave is for cells of one node: leave {cell.name!r} out with --skip or"
                " --only"
            )
        if cell.checkpoint != "none":
            raise UsageError(
                f"--interleave is for trials launched once: leave {cell.name!r} out with --skip or"
                " --only"
            )
    on_gpus = [cell for cell in plan.cells if cell.device == "cuda"]
    if not on_gpus or not (devices := gpus()):
        return
    if reason := too_large_together(on_gpus, min(size for _, size in devices)):
        raise UsageError(f"--interleave: {reason} (--skip CELL, --set batch=N)")


def show_plan(
    out: Console,
    store: Store,
    planned: Plan,
    todo: Sequence[tuple[int, Cell, TrialKey]],
    host: Host,
) -> tuple[dict[str, float], References]:
    """Prints the plan for `host`; returns expected seconds by cell id, and the references."""
    from harness.host.cores import oversubscribed
    from harness.run.expected import expected_seconds, references_of
    from harness.spec.link import over

    seconds = expected_seconds(
        store, planned.cells, host.cores, host.name, planned.timed_seconds_of
    )
    columns = ("strategy", "workload", "devices", "precision", "batch", "expected")
    rows = table(_title(planned), *columns, left=("workload", "precision"))
    for cell in planned.cells:
        crowded = oversubscribed(cell, host.cores and cell.nodes * host.cores)
        devices = f"{cell.devices}{' (more than cores)' if crowded else ''}"
        devices += f" on {cell.nodes} nodes" if cell.nodes > 1 else ""
        devices += f" {over(cell.links)}" if cell.links else ""
        batch = f"{cell.global_batch}{' weak' if cell.regime == 'weak' else ''}"
        each = f"{planned.trials_of(cell)} x {seconds[cell.id]:.1f} s"
        rows.add_row(
            escape(cell.label), escape(cell.workload), devices, cell.precision, batch, each
        )
    out.print(rows)
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
        f"{references.number} reference runs, if none are cached: {duration(references.seconds)},"
        f" {disk}"
    )
    out.print(f"in all about {duration(total + references.seconds)}")
    return seconds, references


def show_headline(out: Console, planned: Plan, headline: PlannedHeadline) -> None:
    """Prints which cells the run's answer is about, and its baseline."""
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
    return timed + (f", and {len(planned.once)} once, for parity" if planned.once else "")
