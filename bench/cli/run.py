"""bench run: runs a matrix."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated

import typer

from bench.cli.options import BaselineCell, JsonAtEnd, ResultsAddedTo


def run(
    matrix: Annotated[
        str,
        typer.Option(
            "--matrix",
            "-m",
            help="Name of a matrix (see: python -m bench list matrices) or a YAML file.",
        ),
    ] = "",
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            help="Only these cells: strategy, id or pattern such as 'ddp*x2*'; may be repeated.",
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", help="Without these cells, named as for --only; may be repeated."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="axis=value for all cells, such as batch=16; may be repeated."),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option("--trials", min=1, help="Launches of each cell; by default the matrix says."),
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            "--precision",
            help=(
                "Adds rounds until the interval of each cell's throughput is at most so wide: 2%"
                " means plus or minus 2 %."
            ),
        ),
    ] = "",
    time_budget: Annotated[
        str,
        typer.Option(
            "--time-budget",
            help=(
                "Adds no round after this time, such as 45min, and leaves out what is left of the"
                " planned rounds from the third on; by default 1h with --precision, else as the"
                " matrix says, or a quarter more than the planned rounds take. Rounds are added for"
                " cells that may still be the fastest, unless --trials says how many there are."
            ),
        ),
    ] = "",
    baseline_cell: BaselineCell = "",
    by_turns: Annotated[
        bool,
        typer.Option(
            "--by-turns",
            help=(
                "The launches of a round are up at once and train in turn, a few steps each: tells"
                " small differences apart."
            ),
        ),
    ] = False,
    timed_seconds: Annotated[
        float | None,
        typer.Option(
            "--timed-seconds",
            min=0,
            help=(
                "On CPUs each launch times steps for so long, with a control between them that"
                " takes the machine's changes of speed out; 0: as many steps as the matrix says,"
                " and no control; by default the matrix says, 2 in most."
            ),
        ),
    ] = None,
    results: ResultsAddedTo = Path("results"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest run, as it was planned.")
    ] = False,
    run_id: Annotated[
        str,
        typer.Option(
            "--run", help="Name of the run: starts it, or goes on with it if it has begun."
        ),
    ] = "",
    share: Annotated[
        str,
        typer.Option(
            "--share",
            help="I/N: only every N-th of the run's cells, from number I on, counted from 0.",
        ),
    ] = "",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show the cells and the time they need, and run nothing."),
    ] = False,
    host: Annotated[
        str,
        typer.Option(
            "--host", help="With --dry-run: plan for another host, like '8 x h100-80gb, 112 cores'."
        ),
    ] = "",
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="At the end launch each cell once more, to record where time and memory go.",
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
            help="File through which the agents find this run, in a folder that all nodes share.",
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
            help="Seconds to wait for the agents; then the run starts without the missing ones.",
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
    json_output: JsonAtEnd = False,
) -> None:
    """Runs a matrix and writes its report.

    Example: [bold]python -m bench run --matrix full --skip three_d --set batch=16[/bold]
    """
    from bench.cli import plan_table, terminal
    from bench.cli.agents import AgentOptions, launchers
    from bench.cli.progress import RunProgress
    from bench.cli.run_plan import PlanOptions, kept_or_new_plan, parse_share
    from bench.host import host_of
    from bench.select import baseline_choice
    from harness.links.launcher import over_links
    from harness.record.plan import kept_plan
    from harness.record.run_lock import sole_writer
    from harness.record.store import Store
    from harness.run.allocation import planned_headline
    from harness.run.runner import Runner
    from harness.spec.errors import UsageError

    begun_at = time.monotonic()
    if with_parent:  # the run continues in another job, so this process must end with its parent
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
    console = terminal.console(quiet=json_output)
    gpus_unused = None if host else terminal.say_unused_gpus(console)
    options = PlanOptions(
        matrix,
        tuple(only or ()),
        tuple(skip or ()),
        tuple(settings or ()),
        trials,
        precision,
        time_budget,
        by_turns,
        timed_seconds,
        run_id,
        host,
        nodes,
    )
    plan, begun = kept_or_new_plan(store, options, resume)
    planned_host, part = host_of(host, nodes), parse_share(share)
    planned = Runner(store, plan, share=part)
    baseline = baseline_choice(baseline_cell, plan.cells)
    seconds, references = plan_table.show(console, store, plan, planned.open_trials(), planned_host)
    if dry_run:
        headline = planned_headline(plan, planned_host.cores)
        plan_table.show_headline(console, plan, headline)
        plan_table.show_inputs(console, planned_host.device)
        if json_output:
            expected = {
                "expected_seconds": seconds,
                "references": dataclasses.asdict(references),
                "headline": headline and plan_table.headline_as_json(headline),
                "gpus_unused": gpus_unused,
            }
            print(json.dumps(json.loads(plan.to_json()) | expected))
        return
    planned.make_room()
    if plan.needs_gpu and not begun:
        console.print("measuring what this GPU reaches, in about 10 s")
    if not (begun or planned.begin()):
        # Another task of the array came first; use its plan.
        plan = kept_plan(store, plan.run_id)
        planned = Runner(store, plan, share=part)
    agents = AgentOptions(nodes, meeting, interface, patience)
    with (
        # A requeued job may meet its earlier processes on a lost node.
        sole_writer(store.folder, plan.run_id, part, 180.0 if with_parent else 0.0),
        terminal.stop_signals(),
        launchers(agents, console.print) as own,
        over_links(planned.cells, own) as launcher,
        RunProgress(console, plan, seconds, len(planned.open_trials())) as progress,
    ):
        runner = Runner(store, plan, launcher, share=part)
        finished = runner.run(progress) and (not explain or runner.explain(progress))
    from bench.cli.run_end import Ended, EndOptions, conclude

    ended = Ended(finished, time.monotonic() - begun_at, not share or runner.all_recorded)
    raise typer.Exit(conclude(store, plan, ended, baseline, EndOptions(report, json_output)))
