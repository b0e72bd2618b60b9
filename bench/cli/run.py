from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from bench.cli.options import (
    BaselineCell,
    DryRun,
    Json,
    Matrix,
    Nodes,
    Only,
    Results,
    Resume,
    RunId,
    Settings,
    Skip,
    Trials,
    WriteReport,
)

RunModel: TypeAlias = Annotated[
    str,
    typer.Option(
        "--model",
        help="Train this model in every cell: a workload, hf:PATH, or your own as FILE.py:CLASS.",
    ),
]
RunData: TypeAlias = Annotated[
    str, typer.Option("--data", help="Train on this dataset in every cell, such as text:FILE.")
]
TimeBudget: TypeAlias = Annotated[
    str,
    typer.Option(
        "--time-budget",
        help=(
            "Time budget, such as 45min; --resume starts it anew. Once it is spent, no round is"
            " added, and planned rounds from the third on are skipped. By default none with"
            " --trials, else the matrix's, else a quarter more than the planned rounds take. Rounds"
            " are added for cells that may be the best, unless --trials fixes their number."
        ),
    ),
]
TimedSeconds: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--timed-seconds",
        min=0,
        help=(
            "Seconds of timed steps per trial on CPUs, interleaved with a control that corrects"
            " for changes in the machine's speed. 0: the matrix's number of steps, without a"
            " control. By default the matrix's."
        ),
    ),
]
Share: TypeAlias = Annotated[
    str,
    typer.Option(
        "--share", help="I/N: run only every N-th cell, beginning with cell I (counted from 0)."
    ),
]
PlannedHost: TypeAlias = Annotated[
    str,
    typer.Option(
        "--host", help="With --dry-run: plan for another host, such as '8 x h100-80gb, 112 cores'."
    ),
]
ProfileCells: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--profile",
        help="Run each cell once more at the end, to record where its time and memory go.",
    ),
]
Rendezvous: TypeAlias = Annotated[
    str,
    typer.Option(
        "--rendezvous",
        metavar="FILE|[HOST]:PORT",
        help=(
            "Where agents find this run: a file in a folder that all nodes share, or the address to"
            " listen on, with the run's key in PARALLELISM_BENCH_KEY or a file named by"
            " PARALLELISM_BENCH_KEY_FILE."
        ),
    ),
]
Interface: TypeAlias = Annotated[
    str, typer.Option("--interface", help="Network interface that reaches all nodes.")
]
AgentTimeout: TypeAlias = Annotated[
    float,
    typer.Option(
        "--timeout", min=0, help="Seconds to wait for agents; the run then starts without the rest."
    ),
]
WithParent: TypeAlias = Annotated[
    bool, typer.Option("--with-parent", hidden=True, help="End when the parent process ends.")
]


def run(
    matrix: Matrix = "",
    only: Only = None,
    skip: Skip = None,
    settings: Settings = None,
    model: RunModel = "",
    data: RunData = "",
    trials: Trials = None,
    time_budget: TimeBudget = "",
    baseline_cell: BaselineCell = "",
    timed_seconds: TimedSeconds = None,
    results: Results = Path("results"),
    resume: Resume = False,
    run_id: RunId = "",
    share: Share = "",
    dry_run: DryRun = False,
    host: PlannedHost = "",
    profile: ProfileCells = False,
    nodes: Nodes = None,
    rendezvous: Rendezvous = "",
    interface: Interface = "",
    timeout: AgentTimeout = 120.0,
    with_parent: WithParent = False,
    report: WriteReport = True,
    json_output: Json = False,
) -> None:
    """Train every cell of a matrix, verify it, and write a report.

    Example: [bold]python -m bench run --matrix full --skip three_d --set batch=16[/bold]
    """
    from bench.cli.run_matrix import EndOptions, run_matrix
    from bench.cli.run_plan import parse_share, parse_time
    from bench.execution import AgentOptions, RunOptions
    from bench.matrix import parse_changes
    from bench.planning import PlanOptions
    from harness.nodes.rendezvous import parse_rendezvous

    where = parse_rendezvous(rendezvous) if rendezvous else None
    agents = AgentOptions(nodes or 1, where, interface, timeout)
    options = RunOptions(results, resume, parse_share(share), dry_run, profile, with_parent, agents)
    plan_options = PlanOptions(
        matrix=matrix,
        only=tuple(only or ()),
        skip=tuple(skip or ()),
        changes=parse_changes(settings or ()) | ({"data": data} if data else {}),
        model=model,
        trials=trials,
        time_budget_seconds=parse_time(time_budget) if time_budget else None,
        timed_seconds=timed_seconds,
        baseline_cell=baseline_cell,
        run_id=run_id,
        host=host,
        nodes=agents.nodes,
    )
    raise typer.Exit(run_matrix(plan_options, options, EndOptions(report, json_output)))
