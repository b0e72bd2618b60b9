from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from bench.cli.options import Json, Only, Results, Settings, WriteReport
from harness.cell.errors import plural

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from bench.matrix import Axes, Host, Matrix
    from harness.analysis.maxsize import MaxsizeResult
    from harness.record.plan import Plan
    from harness.run.runner import Runner

HOME = Path(__file__).parents[1]
CELLS = {
    "model": HOME / "maxsize.yaml",
    "sequence": HOME / "context.yaml",
    "width": HOME / "width.yaml",
}
BUDGETS = {"model": "1GiB", "sequence": "256MiB", "width": "512MiB"}
"""Default memory budgets. Sequences get less, because their step time grows with length squared."""
UNITS_OF_A_HEAD = 64
"""Hidden units that a search step adds, if nobody states another number."""
LONG_TOKENS = 4096
"""Length whose activations about fill the budget at the default hidden size."""

Grow: TypeAlias = Annotated[
    Literal["model", "sequence", "width"] | None,
    typer.Option(
        "--grow",
        help="What to grow: the model by blocks (the default), the sequence, or the block's width.",
    ),
]
Budget: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--budget",
        help="Memory budget of each rank: on a GPU for torch's allocator, on a CPU beyond what its"
        " imports take. By default 1GiB; for sequences 256MiB, for widths 512MiB.",
    ),
]
Devices: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--devices",
        min=1,
        help="Number of devices for strategies that use several; by default 2 on a CPU, else all"
        " GPUs, at most 8, as a power of two.",
    ),
]
Hidden: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--hidden",
        min=64,
        help="Hidden size of the models, by default one that fits the budget; with --grow width,"
        " the units that a step adds, by default 64.",
    ),
]
Resume: TypeAlias = Annotated[bool, typer.Option("--resume", help="Continue the newest search.")]
SearchMatrixFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--search-matrix",
        help="YAML file with the strategies to search, and the order that theory predicts.",
    ),
]


def maxsize(
    grow: Grow = None,
    budget: Budget = None,
    only: Only = None,
    devices: Devices = None,
    hidden: Hidden = None,
    settings: Settings = None,
    search_matrix: SearchMatrixFile = None,
    results: Results = Path("results"),
    resume: Resume = False,
    report: WriteReport = True,
    json_output: Json = False,
) -> None:
    """Find the largest model, longest sequence or widest layer that trains.

    Example: [bold]python -m bench maxsize --budget 1GiB --only fsdp2[/bold]
    """
    from bench.cli import terminal
    from bench.cli.run_progress import SearchProgress
    from harness.cell.errors import UsageError
    from harness.record.plan import MATRIX, require_named, resumable
    from harness.record.store import Store
    from harness.run.maxsize import Search
    from harness.run.runner import Runner

    store = Store(results)
    store.require_writable()
    console = terminal.console(quiet=json_output)
    terminal.say_unused_gpus(console)
    if resume:
        if grow or budget or only or devices or hidden or settings or search_matrix:
            raise UsageError(
                "--resume continues a search as it was planned: leave out --grow, --budget,"
                " --only, --devices, --hidden, --set and --search-matrix"
            )
        plan = resumable(store, MATRIX)
        require_named(plan.cells, [])
        runner = Runner(store, plan)
    else:
        console.print("counting parameters, states and activations")
        what = grow or "model"
        chosen, file = budget or BUDGETS[what], search_matrix or CELLS[what]
        changes = _changes(settings or [], what)
        runner = Runner(store, _plan(what, chosen, devices, hidden, file, only or [], changes))
        runner.begin()
    finished = Search(runner, SearchProgress(console, runner.plan)).run()
    rows = _conclude(console, runner, report, json_output)
    if not finished:
        where = "" if results == Path("results") else f" --results {results}"
        how = f"interrupted; continue with: python -m bench maxsize --resume{where}"
        console.print(how, markup=False)
        raise typer.Exit(130)
    raise typer.Exit(0 if all(_ended_well(row) for row in rows) else 1)


def _ended_well(row: MaxsizeResult) -> bool:
    searched = row.status in ("found", "all fit", "unavailable", "refused")
    return searched and row.parity != "diverged"


def _conclude(
    console: Console, runner: Runner, report: bool, json_output: bool
) -> list[MaxsizeResult]:
    from bench.cli import terminal
    from harness.analysis.maxsize import maxsize_results

    store, plan = runner.store, runner.plan
    loaded = store.load([plan.run_id], steps=False)
    rows = maxsize_results(loaded)
    notes = show(console, plan, rows)
    page = None
    if report:
        from reports import write_report

        path = Path("reports") / "html" / f"{plan.run_id}.html"
        page = write_report(loaded, path, "python -m bench report --out FILE")
    terminal.paths(console, store, plan, page, True)
    if json_output:
        document = {
            "run_id": plan.run_id,
            "results": str(store.folder),
            "report": page and str(page),
            "strategies": [
                dataclasses.asdict(row)
                | {"ratio": row.ratio, "fill": row.fill, "responsible": dict(row.responsible)}
                for row in rows
            ],
            "notes": notes,
        }
        print(json.dumps(document))
    return rows


def _changes(settings: list[str], grow: str = "model") -> Axes:
    """Returns the axes of --set; raises UsageError for one that the search sets."""
    from bench.matrix import parse_changes
    from harness.cell.errors import UsageError

    changes = parse_changes(settings)
    instead = {"workload": "--hidden", "memory_limit_bytes": "--budget", "devices": "--devices"}
    if grow == "sequence":
        instead["sequence_length"] = "--grow model"
    for axis in changes.keys() & instead.keys():
        raise UsageError(
            f"--set {axis}: the search chooses this itself; use {instead[axis]} instead"
        )
    return changes


def _budget_bytes(text: str, many: int, host: Host) -> int:
    """Returns the budget of each of `many` ranks; raises UsageError if the host has less."""
    from bench.matrix import parse_bytes
    from harness.cell.errors import UsageError

    budget = parse_bytes(text)
    needed = budget * (1 if host.device == "cuda" else many)
    if not 0 < needed <= host.memory_bytes:
        whose = "a GPU" if host.device == "cuda" else f"this host for {plural(many, 'rank')}"
        raise UsageError(
            f"--budget {text!r}: give more than 0 and at most the"
            f" {host.memory_bytes / 2**30:.1f} GiB of {whose}"
        )
    return budget


def _plan(
    grow: Literal["model", "sequence", "width"],
    budget_text: str,
    ranks: int | None,
    hidden: int | None,
    file: Path,
    strategies: list[str],
    changes: Axes,
) -> Plan:
    from bench.expand import expand
    from bench.matrix import Host, SearchMatrix, read_as
    from harness.record.plan import BLOCKS, Growth
    from harness.run.maxsize import (
        hidden_size,
        long_hidden_size,
        plan_of,
        token_step,
        wide_size,
    )

    read = read_as(str(file), SearchMatrix)
    host = Host.here()
    many = ranks or host.many
    budget = _budget_bytes(budget_text, many, host)
    growth, grown = BLOCKS, {}
    if grow == "sequence":
        workloads = {"main": f"llama-{hidden or long_hidden_size(budget, LONG_TOKENS, many)}x4"}
        growth = Growth(tokens=token_step(workloads["main"], many, budget))
        grown = {"sequence_length": growth.tokens}
    elif grow == "width":
        growth = Growth(width=hidden or UNITS_OF_A_HEAD)
        workloads = {"main": f"llama-{growth.width}x1"}
    else:
        main = hidden or hidden_size(budget)
        workloads = {"main": f"llama-{main}x1", "wide": f"llama-{max(main, wide_size(many))}x1"}
    expanded = expand(
        _with_ranks(read, many).model_copy(update={"workloads": workloads}),
        host,
        name=str(file),
        only=strategies,
        changes={**changes, **grown, "memory_limit_bytes": budget},
    )
    order = [[label.replace("=ranks", f"={many}") for label in chain] for chain in read.order]
    return plan_of(expanded.cells, expanded.left_out, budget, order, growth)


def _with_ranks(matrix: Matrix, many: int) -> Matrix:
    entries = [
        {**entry, "devices": many} if entry.get("devices") == "many" else entry
        for entry in matrix.cells
    ]
    return matrix.model_copy(
        update={"cells": entries, "numbers": {**matrix.numbers, "ranks": many}}
    )


def show(out: Console, plan: Plan, rows: list[MaxsizeResult]) -> list[str]:
    """Prints the table and what used the memory; returns departures from theory."""
    from rich.markup import escape

    from bench.cli import terminal
    from harness.analysis.maxsize import limits, mebibytes, order_notes
    from harness.record.plan import Growth

    assert plan.search is not None
    first = next((row for row in rows if row.step), None)
    what = Growth.of(plan.search).what
    title = f"{what} that trains within {mebibytes(plan.search['budget'])} per rank"
    if first and first.step:
        title += f"; a search step is {first.amount(first.step)}"
    columns = ("reached", "formula", "ratio", "peak", "set-up peak", "between steps", "parity")
    table = terminal.table(title, "strategy", "ranks", *columns, left=("parity",))
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
            row.text(row.predicted) if row.predicted else "-",
            f"{row.ratio:.2f}" if row.ratio else "-",
            *peaks,
            mebibytes(sum(row.kept_bytes.values())) if row.kept_bytes else "-",
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
    from rich.markup import escape

    from bench.cli import terminal

    names = list(next((row.fill for row in rows if row.fill), {}))
    title = "what fills the budget when memory runs out, MiB"
    kinds = [name.removesuffix(" of threads") for name in names]
    table = terminal.table(title, "strategy", "at", "in", *kinds, left=("in",))
    for row in rows:
        if row.fill:
            sizes = [f"{row.fill[name] / 2**20:.0f}" for name in names]
            table.add_row(
                escape(row.label), row.text(row.next_parameters or 0), row.failed_in or "-", *sizes
            )
    return table
