"""Runs a plan from its first trial to its answer; prints nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, TypeAlias

from bench.matrix import Host, host_of
from bench.planning import kept_or_new_plan
from bench.run_options import CommandOptions
from bench.select import baseline_choice
from harness.analysis.ranking import Choice
from harness.analysis.selection import spread_between_runs
from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.links.emulated import over_links
from harness.record.files import VERSION
from harness.record.plan import Plan, kept_plan
from harness.record.run_record import ConclusionRecord
from harness.record.store import Store, sole_writer
from harness.run.expected import MOST_RUNS, References, expected_seconds, references_of
from harness.run.long_training import LONG_SECONDS, long_cell
from harness.run.runner import ProgressListener, Runner
from harness.seam.registry import offered
from reports.run_report import RunReport, ran

if TYPE_CHECKING:
    from harness.launch.launcher import LauncherProtocol

REQUEUED_SECONDS = 180.0
"""Seconds to wait for processes of a requeued job's previous start."""

StartListener: TypeAlias = Callable[
    [Plan, Sequence[Cell]], contextlib.AbstractContextManager[ProgressListener]
]
"""Makes a run's listener from its plan and the cell of each open trial."""


@dataclass(frozen=True)
class Prepared:
    store: Store
    plan: Plan
    begun: bool
    host: Host
    part: tuple[int, int]
    baseline: Choice | None
    trials_to_run: int
    seconds: dict[str, float]
    """Expected seconds per trial, by cell id."""
    total_seconds: float
    references: References


@dataclass(frozen=True)
class Ended:
    plan: Plan
    finished: bool
    wall_seconds: float
    all_recorded: bool


def prepare(options: CommandOptions) -> Prepared:
    """Plans or continues a run; raises UsageError for a mistake."""
    nodes, part = options.nodes or 1, options.part
    store = Store(options.results)
    store.require_writable()
    if nodes > 1 and not options.rendezvous:
        raise UsageError(
            "--nodes needs --rendezvous, where the agents of the nodes find this run; python"
            " -m bench submit sets both"
        )
    if options.host and not (options.dry_run and options.matrix):
        raise UsageError("--host only plans for another host: it needs --matrix and --dry-run")
    if part[1] > 1 and options.time_budget_seconds is not None:
        raise UsageError(
            "--share runs all planned rounds, so --time-budget cannot shorten them: leave it out"
        )
    plan, begun = kept_or_new_plan(store, options)
    host = host_of(options.host, nodes)
    todo = Runner(store, plan, share=part).open_trials()
    trained_long = {trial.cell.strategy for trial in todo if long_cell(trial.cell)}
    long_seconds = LONG_SECONDS * len(trained_long) if plan.long_training else 0.0
    seconds = expected_seconds(
        store,
        list(filter(offered, plan.cells)),
        host.cores,
        host.name,
        plan.timed_seconds_of,
        None if host.elsewhere else _hardware(),
    )
    return Prepared(
        store,
        plan,
        begun,
        host,
        part,
        baseline_choice(options.baseline, plan.cells),
        len(todo),
        seconds,
        sum(seconds[trial.cell.id] for trial in todo) + long_seconds + 4,
        references_of([trial.cell for trial in todo], host.cores, host.name),
    )


def _hardware() -> dict[str, object]:
    """Returns columns that must match for a run's times to count here."""
    from harness.host.cores import allowed_cores
    from harness.host.environment import cpu_model, device_type, gpus

    used = gpus() if device_type() == "cuda" else ()
    return {
        "cpu_model": cpu_model(),
        "cpu_cores": len(allowed_cores()),
        "gpus": [name for name, _ in used],
    }


def execute(
    prepared: Prepared,
    options: CommandOptions,
    listener: StartListener,
    say: Callable[[str], None] = lambda sentence: None,
) -> Ended:
    """Runs all open trials. `say`: receives messages before the first one."""
    began_at = time.monotonic()
    plan = _begin(prepared, say)
    store, part = prepared.store, prepared.part
    waiting = Runner(store, plan, share=part)
    patience = REQUEUED_SECONDS if options.with_parent else 0.0
    with (
        sole_writer(store.folder, plan.run_id, part, patience),
        _launchers(options, say) as launchers,
        over_links(waiting.cells, launchers) as launcher,
        listener(plan, [trial.cell for trial in waiting.open_trials()]) as progress,
    ):
        runner = Runner(store, plan, launcher, share=part, baseline=prepared.baseline)
        finished = runner.run(progress) and (not options.profile or runner.explain(progress))
    seconds = time.monotonic() - began_at
    return Ended(plan, finished, seconds, part == (0, 1) or runner.all_recorded)


def _begin(prepared: Prepared, say: Callable[[str], None]) -> Plan:
    plan = prepared.plan
    runner = Runner(prepared.store, plan, share=prepared.part)
    runner.make_room()
    if plan.needs_gpu and not prepared.begun:
        say("measuring this GPU's peak rates, in about 10 s")
    if prepared.begun or runner.begin():
        return plan
    # Another task of the job array has begun the run.
    return kept_plan(prepared.store, plan.run_id)


@contextlib.contextmanager
def _launchers(
    options: CommandOptions, say: Callable[[str], None]
) -> Iterator[Callable[[Sequence[str]], LauncherProtocol]]:
    """Yields the run's launcher factory. If the run has agents, they connect first."""
    from harness.launch.launcher import Launcher
    from harness.nodes.coordinator import Nodes, NodesLauncher
    from harness.nodes.rendezvous import parse_rendezvous

    if not options.rendezvous:
        yield Launcher
        return
    wanted = options.nodes or 1
    nodes = Nodes(wanted, parse_rendezvous(options.rendezvous), options.interface or None)
    try:
        present = nodes.ready(wanted, options.timeout)
        nodes.check()
        nodes.measure()
        names = ", ".join(node.name for node in present)
        lacking = "" if len(present) == wanted else f"; {nodes.shortfall(wanted)}"
        say(f"nodes: {names}{lacking}")
        yield functools.partial(NodesLauncher, nodes)
    finally:
        nodes.close()


def conclude(store: Store, ended: Ended, baseline: Choice | None) -> RunReport | None:
    """Records a run's conclusion. Returns its report; None if nothing was recorded."""
    plan = ended.plan
    store.gather(plan.run_id)
    loaded = store.load([plan.run_id], steps=False)
    if loaded.trials.empty:
        return None
    report = ran(loaded, baseline)
    if ended.all_recorded:
        store.write_conclusion(_conclusion(report, store, ended.wall_seconds))
        loaded = store.load([plan.run_id], steps=False)
    return dataclasses.replace(report, results=loaded)


def _conclusion(report: RunReport, store: Store, wall_seconds: float) -> ConclusionRecord:
    advised, between_runs = report.advised, ""
    use = advised.advice[0] if advised else None
    newest = store.run_ids()[-MOST_RUNS:]
    if advised and advised.rival and advised.baseline and len(newest) > 1:
        loaded = store.load(newest, steps=False)
        between_runs = spread_between_runs(advised.rival, advised.baseline, loaded)
    return ConclusionRecord(
        schema_version=VERSION,
        run_id=report.run_id,
        concluded_at=datetime.now(timezone.utc),
        wall_seconds=wall_seconds,
        trials=len(report.results.trials),
        half_width=advised.precision if advised else None,
        advised_cell_id=use.cell.cell_id if use else None,
        advice=use.sentence if use else None,
        between_runs=between_runs,
    )
