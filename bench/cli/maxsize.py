"""bench maxsize: the largest trainable model of each strategy under a budget of memory per rank."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli.options import JsonAtEnd, ResultsAddedTo

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from bench.matrix import Axes
    from harness.analysis.maxsize import MaxsizeResult
    from harness.record.plan import Plan
    from harness.record.trial import TrialRecord
    from harness.spec.cell import Cell

HOME = Path(__file__).parents[1] / "maxsize.yaml"


def maxsize(
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            help="Memory of a rank beyond its imports, on a GPU in all; by default 1GiB.",
        ),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy", help="Only these strategies or patterns over labels; may be repeated."
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            min=1,
            help="Devices of the strategies that use several; 2 on a CPU, all GPUs up to 8.",
        ),
    ] = None,
    hidden: Annotated[
        int | None,
        typer.Option(
            "--hidden",
            min=64,
            help="Hidden size of the models; by default so small that blocks are fine steps.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="axis=value for all cells, such as recompute=full; may be repeated."
        ),
    ] = None,
    cells: Annotated[
        Path,
        typer.Option(
            "--cells",
            help="YAML file with the strategies and the order that theory expects of them.",
        ),
    ] = HOME,
    results: ResultsAddedTo = Path("results"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest search, as it was planned.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Write the HTML report at the end.")
    ] = True,
    json_output: JsonAtEnd = False,
) -> None:
    """Finds the largest model that each strategy trains.

    Example: [bold]python -m bench maxsize --budget 1GiB --strategy fsdp2[/bold]
    """
    from bench.cli import terminal
    from harness.analysis.maxsize_table import maxsize_results
    from harness.record.plan import resumable
    from harness.record.search import MATRIX
    from harness.record.store import Store
    from harness.run.maxsize import Search
    from harness.run.runner import Runner
    from harness.spec.errors import UsageError

    store = Store(results)
    store.require_writable()
    console = terminal.console(quiet=json_output)
    if resume:
        if budget or strategy or ranks or hidden or settings:
            raise UsageError(
                "--resume goes on with a search as it was planned: leave --budget, --strategy,"
                " --ranks, --hidden and --set out"
            )
        plan = resumable(store, MATRIX)
    else:
        console.print("counting parameters, states and activations")
        changes = _changes(settings or [])
        plan = _plan(budget or "1GiB", strategy or [], ranks, hidden, cells, changes)
    runner = Runner(store, plan)
    if not resume:
        runner.begin()
    with terminal.stop_signals():
        finished = Search(runner, Progress(console, plan)).run()
    loaded = store.load([plan.run_id], steps=False)
    rows = maxsize_results(loaded)
    notes = _show(console, plan, rows)
    page = None
    if report:
        from reports import write_report

        path = Path("reports") / "html" / f"{plan.run_id}.html"
        page = write_report(loaded, path, "python -m bench report --out FILE")
    terminal.paths(console, store, plan, page, True)
    if json_output:
        shown = [
            dataclasses.asdict(row)
            | {
                "ratio": row.ratio,
                "fill": row.fill,
                "responsible": dict(row.responsible),
            }
            for row in rows
        ]
        document = {
            "run_id": plan.run_id,
            "results": str(store.folder),
            "report": page and str(page),
            "strategies": shown,
            "notes": notes,
        }
        print(json.dumps(document))
    if not finished:
        where = "" if results == Path("results") else f" --results {results}"
        console.print(f"interrupted; go on with: python -m bench maxsize --resume{where}")
        raise typer.Exit(130)
    fine = all(
        row.status in ("found", "all fit", "unavailable", "refused") and row.parity != "diverged"
        for row in rows
    )
    raise typer.Exit(0 if fine else 1)


def _changes(settings: list[str]) -> Axes:
    """Values of axes by `--set`; raises UsageError for one that the search itself sets."""
    from bench.matrix import parse_changes
    from harness.spec.errors import UsageError

    changes = parse_changes(settings)
    instead = {"workload": "--hidden", "memory_limit_bytes": "--budget", "devices": "--ranks"}
    for axis in changes.keys() & instead.keys():
        raise UsageError(f"--set {axis}: the search sets it itself; use {instead[axis]}")
    return changes


def _plan(
    budget_text: str,
    strategies: list[str],
    ranks: int | None,
    hidden: int | None,
    file: Path,
    changes: Axes,
) -> Plan:
    """The search's plan; raises UsageError for what this host cannot do."""
    from pydantic import Field

    from bench.expand import expand
    from bench.host import Host
    from bench.matrix import Matrix, parse_bytes, read_as
    from harness.run.maxsize import hidden_size, plan_of, wide_size
    from harness.spec.errors import UsageError

    class Families(Matrix):
        """A matrix whose cells are searched, and chains of their labels in the order of theory."""

        order: list[list[str]] = Field(default_factory=list)

    read = read_as(str(file), Families)
    host = Host.here()
    budget, many = parse_bytes(budget_text), ranks or host.many
    needed = budget * (1 if host.device == "cuda" else many)
    if not 0 < needed <= host.memory_bytes:
        whose = "a GPU" if host.device == "cuda" else f"this host for {many} ranks"
        raise UsageError(
            f"--budget {budget_text!r}: give more than 0 and no more than the"
            f" {host.memory_bytes / 2**30:.1f} GiB of {whose}"
        )
    entries = [
        {**entry, "devices": many} if entry.get("devices") == "many" else entry
        for entry in read.cells
    ]
    main = hidden or hidden_size(budget)
    families = {"main": f"llama-{main}x1", "wide": f"llama-{max(main, wide_size(many))}x1"}
    here = read.model_copy(update={"cells": entries, "workloads": families})
    expanded = expand(
        here,
        host,
        name=str(file),
        only=strategies,
        changes={**changes, "memory_limit_bytes": budget},
        only_option="--strategy",
    )
    return plan_of(expanded.cells, expanded.left_out, budget, read.order)


class Progress:
    """A line for every probe, with the time that is left."""

    def __init__(self, out: Console, plan: Plan) -> None:
        self.out, self.plan = out, plan
        self.place = {cell.label: number for number, cell in enumerate(plan.cells)}
        self.began = time.monotonic()

    def preparing(self, what: str) -> None:
        self.out.print(what)

    def round_added(self, cells: Sequence[Cell]) -> None: ...

    def trial_started(self, cell: Cell, trial: int, position: int) -> None: ...

    def step(self, step: int, seconds: float) -> None: ...

    def trial_finished(self, cell: Cell, trial: TrialRecord) -> None:
        from rich.markup import escape

        from bench.cli import terminal
        from harness.analysis.maxsize import millions

        number, total = self.place[cell.label], len(self.plan.cells)
        share = (
            number + (0.9 if trial.trial else 0.5)
        ) / total  # a strategy's probes are half done on average
        left = (time.monotonic() - self.began) * (1 - share) / share
        if trial.status == "ok":
            words = f"trains, parity {trial.parity_verdict}" if trial.trial else "fits"
        elif trial.status == "out_of_memory":
            words = f"out of memory in {trial.failed_in}" if trial.failed_in else "out of memory"
        else:
            words = f"{trial.status}: {trial.reason}"
        assert trial.parameters is not None
        assert trial.wall_seconds is not None
        size = f"{cell.workload.rpartition('x')[2]} blocks, {millions(trial.parameters)} parameters"
        text = (
            f"{cell.label}: {size}{'' if cell.memory_limit_bytes else ' without the limit'}:"
            f" {words} ({trial.wall_seconds:.1f} s)"
        )
        self.out.print(
            escape(f"[{number + 1}/{total}] {text}, about {terminal.duration(left)} left")
        )


def _show(out: Console, plan: Plan, rows: list[MaxsizeResult]) -> list[str]:
    """Prints the table, the bytes responsible and where the order is not the theory's; returns
    these notes."""
    from rich.markup import escape
    from rich.table import Table

    from harness.analysis.maxsize import limits, mebibytes, millions, order_notes

    assert plan.search is not None
    step = next((row.step for row in rows if row.step), 0)
    title = (
        f"largest trainable model within {mebibytes(plan.search['budget'])} per rank; a search step"
        f" is {millions(step)} parameters"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("strategy", overflow="fold")
    table.add_column("ranks", justify="right")
    for column in ("reached", "formula", "ratio", "peak", "set-up peak", "between steps"):
        table.add_column(column, justify="right")
    table.add_column("parity")
    devices = {cell.label: str(cell.devices) for cell in plan.cells}
    for row in rows:
        peaks = [
            mebibytes(size) if size else "-"
            for size in (row.peak_memory_bytes, row.setup_peak_memory_bytes)
        ]
        table.add_row(
            escape(row.label),
            devices.get(row.label, "-"),
            row.largest_model,
            millions(row.predicted) if row.predicted else "-",
            f"{row.ratio:.2f}" if row.ratio else "-",
            *peaks,
            mebibytes(sum(row.kept.values())) if row.kept else "-",
            row.parity or "-",
        )
    out.print(table)
    out.print(_filled(rows))
    for row in rows:
        if row.reason:
            out.print(escape(f"{row.label}: {row.status}: {row.reason}"))
        elif reasons := limits(row):
            out.print(escape(f"{row.label}: {reasons}"))
    notes = order_notes(rows, plan.search["order"])
    for note in notes:
        out.print(escape(note))
    return notes


def _filled(rows: list[MaxsizeResult]) -> Table:
    """What filled the budget of each strategy at the smallest size that does not train."""
    from rich.markup import escape
    from rich.table import Table

    from harness.analysis.maxsize import millions

    names = list(next((row.fill for row in rows if row.fill), {}))
    table = Table(title="what fills the budget where memory runs out, MiB", title_justify="left")
    table.add_column("strategy", overflow="fold")
    table.add_column("at", justify="right")
    table.add_column("in")
    for name in names:
        table.add_column(name.removesuffix(" of threads"), justify="right")
    for row in rows:
        if row.fill:
            sizes = [f"{row.fill[name] / 2**20:.0f}" for name in names]
            table.add_row(
                escape(row.label), millions(row.next_parameters or 0), row.failed_in or "-", *sizes
            )
    return table
