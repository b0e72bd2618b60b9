"""bench run: a matrix, from the plan to the table and the report."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.record.status import NOT_LAUNCHED

if TYPE_CHECKING:
    from harness.launch.launcher import LauncherProtocol
    from harness.record.plan import Plan
    from harness.record.store import Store


def run(
    matrix: Annotated[
        str,
        typer.Option(
            "--matrix", "-m", help="Name of a matrix (see `list matrices`) or a YAML file."
        ),
    ] = "",
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Strategy or pattern to keep; may be repeated."),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", help="Strategy or pattern to leave out; may be repeated."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="axis=value for all cells; may be repeated.")
    ] = None,
    trials: Annotated[
        int | None, typer.Option("--trials", min=1, help="Launches of each cell.")
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            "--precision",
            help=(
                "Adds rounds until each interval is this narrow: 2% is half its width over the"
                " throughput."
            ),
        ),
    ] = "",
    time_budget: Annotated[
        str,
        typer.Option(
            "--time-budget", help="With --precision: no round is added after 45min, 2h, ..."
        ),
    ] = "1h",
    by_turns: Annotated[
        bool,
        typer.Option(
            "--by-turns",
            help=(
                "The launches of a round train at once, one of them at a time: tells small"
                " differences."
            ),
        ),
    ] = False,
    results: Annotated[
        Path, typer.Option("--results", help="Folder that results are added to.")
    ] = Path("results"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest unfinished run.")
    ] = False,
    run_id: Annotated[
        str,
        typer.Option(
            "--run", help="Name of the run: begins it, or goes on with it where it has begun."
        ),
    ] = "",
    share: Annotated[
        str,
        typer.Option(
            "--share",
            help="I/N: of the run's cells only every N-th, from number I on, counted from 0.",
        ),
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the cells and stop.")] = False,
    host: Annotated[
        str,
        typer.Option("--host", help="With --dry-run: plan for another host, like '8 x h100-80gb'."),
    ] = "",
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="At the end, one more launch of each cell: where time and memory go."
        ),
    ] = False,
    nodes: Annotated[
        int,
        typer.Option(
            "--nodes", min=1, help="Nodes of this run, each with an agent (see docs/cluster.md)."
        ),
    ] = 1,
    meeting: Annotated[
        Path | None,
        typer.Option(
            "--meeting",
            help="File, in a folder that all nodes share, in which agents find this run.",
        ),
    ] = None,
    interface: Annotated[
        str, typer.Option("--interface", help="Network interface that reaches all nodes.")
    ] = "",
    patience: Annotated[
        float,
        typer.Option(
            "--patience",
            min=0,
            help="Seconds to wait for the agents; the run then begins without some of them.",
        ),
    ] = 120.0,
    with_parent: Annotated[
        bool,
        typer.Option(
            "--with-parent", hidden=True, help="End when the process that started this one does."
        ),
    ] = False,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Write the HTML report at the end.")
    ] = True,
    json_output: Annotated[
        bool, typer.Option("--json", help="For machines: one JSON object at the end.")
    ] = False,
) -> None:
    """Runs a matrix and writes its report.

    Example: [bold]python -m bench run --matrix full --skip three_d --set batch=16[/bold]
    """
    from bench.cli import terminal
    from bench.host import host_of
    from harness.links.launcher import over_links
    from harness.record.plan import kept_plan, resumable
    from harness.record.store import Store
    from harness.run.runner import Runner
    from harness.spec.errors import UsageError

    if (
        with_parent
    ):  # a batch step that was killed may leave this process, and the run goes on in another job
        from harness.host.process import die_with_parent

        die_with_parent()
    store = Store(results)
    store.require_writable()
    if nodes > 1 and not meeting:
        raise UsageError(
            "--nodes needs --meeting FILE, where the agents of the nodes find this run; python -m"
            " bench submit sees to both"
        )
    if host and not (dry_run and matrix):
        raise UsageError(
            "--host plans for another host, which cannot run here: it goes with --matrix and"
            " --dry-run"
        )
    begun = bool(run_id) and run_id in store.run_ids()
    if begun:
        plan = kept_plan(store, run_id)
    elif resume:
        if only or skip or settings or trials or precision or by_turns:
            said = "leave --only, --skip, --set, --trials, --precision and --by-turns out"
            raise UsageError(f"--resume goes on with a run as it was planned: {said}")
        plan = resumable(store, matrix or None)
    elif matrix:
        plan = _plan(matrix, only or [], skip or [], settings or [], trials, nodes, run_id, host)
        if precision:
            plan = dataclasses.replace(
                plan, precision=_share(precision), time_budget_seconds=_seconds(time_budget)
            )
        if by_turns:
            _require_few(plan)
            plan = dataclasses.replace(plan, by_turns=True)
    else:
        raise UsageError(
            "--matrix is missing; try --matrix smoke, or see: python -m bench list matrices"
        )

    console, there = terminal.console(quiet=json_output), host_of(host, nodes)
    runner = Runner(store, plan, share=_part(share))
    todo = runner.open_trials()
    seconds, references = terminal.plan(console, store, plan, todo, there.name)
    if dry_run:
        terminal.inputs(console, there.device)
        if json_output:
            print(
                json.dumps(
                    json.loads(plan.to_json())
                    | {
                        "expected_seconds": seconds,
                        "references": dataclasses.asdict(references),
                    }
                )
            )
        return
    runner.make_room()
    if not (
        resume or begun or runner.begin()
    ):  # another task of the array was first: its plan is the run's
        runner.plan = plan = kept_plan(store, plan.run_id)
        todo = runner.open_trials()
    with (
        terminal.stop_signals(),
        _agents(nodes, meeting, interface, patience, console.print) as own,
        over_links(runner.cells, own) as launcher,
        terminal.Drawing(console, plan, seconds, len(todo)) as drawing,
    ):
        runner.launcher = launcher
        finished = runner.run(drawing) and (not explain or runner.explain(drawing))
    raise typer.Exit(
        _end(store, plan, finished, report and (not share or runner.all_recorded), json_output)
    )


@contextlib.contextmanager
def _agents(
    count: int, meeting: Path | None, interface: str, patience: float, say: Callable[[str], None]
) -> Iterator[Callable[[Sequence[str]], LauncherProtocol]]:
    """The launcher of a run on one node, or over the agents of several, who come while the run
    begins."""
    from harness.launch.launcher import Launcher
    from harness.nodes.coordinator import Nodes, NodesLauncher

    if meeting is None:
        yield Launcher
        return
    nodes = Nodes(count, meeting, interface or None)
    try:
        there = nodes.ready(count, patience)
        nodes.check()
        nodes.measure()
        say(
            f"nodes: {', '.join(node.name for node in there)}"
            + ("" if len(there) == count else f"; {nodes.lacking(count)}")
        )
        yield functools.partial(NodesLauncher, nodes)
    finally:
        nodes.close()


def _part(text: str) -> tuple[int, int]:
    from harness.spec.errors import UsageError

    found = re.fullmatch(r"(\d+)/(\d+)", text or "0/1")
    if not found or int(found[1]) >= int(found[2]):
        raise UsageError(f"--share {text!r} is no share; the second of four is 1/4")
    return int(found[1]), int(found[2])


def _share(text: str) -> float:
    from harness.spec.errors import UsageError

    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if not found or not 0 < float(found[1]) < 100:
        raise UsageError(
            f"--precision {text!r} is not a share; give half the width of the interval over the"
            " throughput, like 2%"
        )
    return float(found[1]) / 100


def _seconds(text: str) -> float:
    from harness.spec.errors import UsageError

    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h)", text.strip())
    if not found or not float(found[1]):
        raise UsageError(
            f"--time-budget {text!r} is not a time; give a number with s, min or h, like 45min"
        )
    return float(found[1]) * {"s": 1, "min": 60, "h": 3600}[found[2]]


def _require_few(plan: Plan) -> None:
    """Raises UsageError for cells that cannot train by turns."""
    from harness.host.environment import gpus
    from harness.launch.interleaved import MOST_CELLS
    from harness.run.fits import too_large_together
    from harness.spec.errors import UsageError

    if not 2 <= len(plan.cells) <= MOST_CELLS:
        raise UsageError(
            f"--by-turns is for 2 to {MOST_CELLS} cells, which are all in memory, not"
            f" {len(plan.cells)}; choose them with --only"
        )
    for cell in plan.cells:
        if cell.nodes > 1:
            raise UsageError(
                f"--by-turns is for cells of one node: leave {cell.name!r} out with --skip or"
                " --only"
            )
    on_gpus = [cell for cell in plan.cells if cell.device == "cuda"]
    if (
        on_gpus
        and (devices := gpus())
        and (why := too_large_together(on_gpus, min(size for _, size in devices)))
    ):
        raise UsageError(f"--by-turns: {why} (--skip CELL, --set batch=N)")


def _plan(
    matrix: str,
    only: list[str],
    skip: list[str],
    settings: list[str],
    trials: int | None,
    nodes: int,
    run_id: str,
    host: str,
) -> Plan:
    from bench.expand import expand
    from bench.host import host_of
    from bench.matrix import parse_changes, read_matrix
    from harness.record.plan import Plan

    read = read_matrix(matrix)
    planned = host_of(host, nodes)
    expanded = expand(
        read, planned, name=matrix, only=only, skip=skip, changes=parse_changes(settings)
    )
    return Plan.new(
        matrix,
        expanded.cells,
        trials or read.trials_on(planned),
        expanded.left_out,
        run_id,
        expanded.once,
    )


def _end(store: Store, plan: Plan, finished: bool, report: bool, json_output: bool) -> int:
    """Shows the ranking and the paths, writes the report; returns the exit code."""
    from rich.markup import escape

    from bench.cli import terminal
    from harness.analysis.summary import cells, too_wide

    console = terminal.console(quiet=json_output)
    store.gather(plan.run_id)
    loaded = store.load([plan.run_id], steps=False)
    if loaded.trials.empty:
        console.print("nothing was recorded")
        return 0 if finished else 130
    table = cells(loaded.trials)
    terminal.ranking(console, table)
    wide = (
        too_wide(loaded.trials, plan.precision) if finished and plan.precision is not None else {}
    )
    wide = {cell: share for cell, share in wide.items() if cell not in plan.once}
    if plan.precision is not None and wide:
        names = table.set_index("cell_id")["cell_name"]
        said = ", ".join(f"{names[cell]} ({share:.1%})" for cell, share in wide.items())
        console.print(
            f"[yellow]interval wider than {plan.precision:.2%}[/yellow]: {escape(said)}; the time"
            " budget is spent",
            highlight=False,
        )
    page = None
    if report:
        from reports import write_report

        page = write_report(loaded, Path("reports") / "html" / f"{plan.run_id}.html")
    fine = table["status"].isin(NOT_LAUNCHED) | table["ranked"] | table["expected"]
    terminal.paths(console, store, plan, page, finished)
    if json_output:
        columns = [
            "cell_id",
            "cell_name",
            "status",
            "reason",
            "samples_per_second",
            "peak_memory_bytes",
            "parity_verdict",
        ]
        records = json.loads(table[columns].to_json(orient="records"))
        print(
            json.dumps(
                {
                    "run_id": plan.run_id,
                    "results": str(store.folder),
                    "report": page and str(page),
                    "cells": records,
                }
            )
        )
    if not finished:
        return 130
    return 0 if fine.all() else 1
