"""Runs a planned matrix; prints its ranking, answer and report."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from bench.cli import terminal
from bench.cli.run_plan import (
    PlanOptions,
    headline_as_json,
    kept_or_new_plan,
    parse_share,
    show_headline,
    show_inputs,
    show_plan,
)
from bench.cli.run_progress import RunProgress
from bench.host import Host, host_of
from bench.select import baseline_choice
from harness.analysis.answer import Answer, answer, nothing_to_choose, what_more_would_buy
from harness.analysis.baseline import Choice
from harness.analysis.precision import Precision, precision, too_wide
from harness.analysis.setting import timed
from harness.analysis.summary import cell_results
from harness.links.emulated import over_links
from harness.record.plan import Plan, kept_plan
from harness.record.profile_record import ProfileRecord
from harness.record.run_lock import sole_writer
from harness.record.run_record import ConclusionRecord, RunRecord
from harness.record.schema import VERSION
from harness.record.store import Store
from harness.record.trial_status import NOT_LAUNCHED
from harness.run.allocation import planned_headline
from harness.run.expected import References
from harness.run.runner import Runner
from harness.spec.errors import UsageError
from reports import write_report
from reports.groups import find_groups, headline

if TYPE_CHECKING:
    from rich.console import Console

    from harness.analysis.cell_result import CellResult
    from harness.launch.launcher import LauncherProtocol
    from harness.record.store import Results

REQUEUED_SECONDS = 180.0
"""How long a requeued job waits for its earlier processes, which may be on a lost node."""


@dataclass(frozen=True)
class AgentOptions:
    nodes: int
    rendezvous_file: Path | None
    """File in which the agents find the run; None: this host alone."""
    interface: str
    timeout_seconds: float
    """Seconds to wait for the agents; the run then starts without the rest."""


@dataclass(frozen=True)
class RunOptions:
    results: Path
    resume: bool
    share: str
    dry_run: bool
    baseline_cell: str
    profile: bool
    """Whether to profile each cell afterwards."""
    with_parent: bool
    """Whether to end with the parent process, as another job continues the run."""
    agents: AgentOptions


@dataclass(frozen=True)
class Prepared:
    """A run before its first trial."""

    store: Store
    plan: Plan
    begun: bool
    host: Host
    """Host that the plan is for."""
    gpus_unused: str | None
    part: tuple[int, int]
    baseline: Choice | None
    seconds: dict[str, float]
    """Expected seconds per trial, by cell id."""
    references: References


def run_matrix(plan_options: PlanOptions, options: RunOptions, end: EndOptions) -> int:
    began_at = time.monotonic()
    if options.with_parent:
        from harness.host.process import die_with_parent

        die_with_parent()
    console = terminal.console(quiet=end.json_output)
    prepared = _prepare(console, plan_options, options)
    if options.dry_run:
        _show_dry_run(console, prepared, end.json_output)
        return 0
    plan = _begin(console, prepared)
    store, part = prepared.store, prepared.part
    waiting = Runner(store, plan, share=part)
    with (
        sole_writer(
            store.folder, plan.run_id, part, REQUEUED_SECONDS if options.with_parent else 0.0
        ),
        terminal.stop_signals(),
        _launchers(options.agents, console.print) as own,
        over_links(waiting.cells, own) as launcher,
        RunProgress(console, plan, prepared.seconds, len(waiting.open_trials())) as progress,
    ):
        runner = Runner(store, plan, launcher, share=part)
        finished = runner.run(progress) and (not options.profile or runner.explain(progress))
    wall_seconds = time.monotonic() - began_at
    ended = Ended(finished, wall_seconds, not options.share or runner.all_recorded)
    return conclude(store, plan, ended, prepared.baseline, end)


def _prepare(console: Console, plan_options: PlanOptions, options: RunOptions) -> Prepared:
    """Prints the plan; raises UsageError for mistaken options."""
    host_name, nodes = plan_options.host, options.agents.nodes
    store = Store(options.results)
    store.require_writable()
    if nodes > 1 and not options.agents.rendezvous_file:
        raise UsageError(
            "--nodes needs --rendezvous FILE, where the agents of the nodes find this run; python"
            " -m bench slurm submit sets both"
        )
    if host_name and not (options.dry_run and plan_options.matrix):
        raise UsageError(
            "--host plans for another host, which cannot run here: it needs --matrix and --dry-run"
        )
    gpus_unused = None if host_name else terminal.say_unused_gpus(console)
    plan, begun = kept_or_new_plan(store, plan_options, options.resume)
    host, part = host_of(host_name, nodes), parse_share(options.share)
    todo = Runner(store, plan, share=part).open_trials()
    baseline = baseline_choice(options.baseline_cell, plan.cells)
    seconds, references = show_plan(console, store, plan, todo, host)
    return Prepared(store, plan, begun, host, gpus_unused, part, baseline, seconds, references)


def _show_dry_run(console: Console, prepared: Prepared, json_output: bool) -> None:
    plan, host = prepared.plan, prepared.host
    planned = planned_headline(plan, host.cores)
    if planned:
        show_headline(console, plan, planned)
    show_inputs(console, host.device)
    if json_output:
        expected = {
            "expected_seconds": prepared.seconds,
            "references": dataclasses.asdict(prepared.references),
            "headline": planned and headline_as_json(planned),
            "gpus_unused": prepared.gpus_unused,
        }
        print(json.dumps(json.loads(plan.to_json()) | expected))


def _begin(console: Console, prepared: Prepared) -> Plan:
    """Records the start of a new run; returns the plan to run."""
    plan = prepared.plan
    runner = Runner(prepared.store, plan, share=prepared.part)
    runner.make_room()
    if plan.needs_gpu and not prepared.begun:
        console.print("measuring this GPU's peak rates, in about 10 s")
    if prepared.begun or runner.begin():
        return plan
    # Another task of the array came first.
    return kept_plan(prepared.store, plan.run_id)


@contextlib.contextmanager
def _launchers(
    options: AgentOptions, say: Callable[[str], None]
) -> Iterator[Callable[[Sequence[str]], LauncherProtocol]]:
    """Yields the factory of a run's launchers, over the agents if any, which connect as the run
    begins."""
    from harness.launch.launcher import Launcher
    from harness.nodes.coordinator import Nodes, NodesLauncher

    if options.rendezvous_file is None:
        yield Launcher
        return
    nodes = Nodes(options.nodes, options.rendezvous_file, options.interface or None)
    try:
        present = nodes.ready(options.nodes, options.timeout_seconds)
        nodes.check()
        nodes.measure()
        names = ", ".join(node.name for node in present)
        lacking = "" if len(present) == options.nodes else f"; {nodes.shortfall(options.nodes)}"
        say(f"nodes: {names}{lacking}")
        yield functools.partial(NodesLauncher, nodes)
    finally:
        nodes.close()


@dataclass(frozen=True)
class Ended:
    finished: bool
    """False if it was interrupted."""
    wall_seconds: float
    all_recorded: bool
    """Whether every share is complete."""


@dataclass(frozen=True)
class EndOptions:
    report: bool
    json_output: bool


def conclude(
    store: Store, plan: Plan, ended: Ended, baseline: Choice | None, options: EndOptions
) -> int:
    """Prints ranking, answer and paths; writes the report; returns the exit code."""
    console = terminal.console(quiet=options.json_output)
    store.gather(plan.run_id)
    loaded = store.load([plan.run_id], steps=False)
    if loaded.trials.empty:
        console.print("nothing was recorded")
        return 0 if ended.finished else 130
    results = cell_results(loaded.trials, baseline)
    terminal.ranking(console, results)
    if ended.finished:
        _say_what_is_too_wide(console, plan, loaded, results)
    measured = timed(results, plan.once)
    leading = headline(find_groups(results), plan.once) if plan.search is None else None
    profiles = {profile.cell_id: profile for profile in ProfileRecord.from_frame(loaded.explained)}
    advised = answer(leading.rows, profiles) if leading else None
    if leading and advised:
        terminal.advice(console, advised, leading.full_title)
    elif leading:
        console.print(f"no advice: {nothing_to_choose(leading.rows)}", highlight=False)
    if plan.until_answered and (more := what_more_would_buy(measured)):
        console.print(f"{more} (--time-budget)", highlight=False)
    known = precision(measured)
    if known:
        console.print(known.sentence, highlight=False)
    if ended.all_recorded:
        store.write_conclusion(_conclusion(plan, ended, len(loaded.trials), known, advised))
    page = None
    if options.report and ended.all_recorded:
        path = Path("reports") / "html" / f"{plan.run_id}.html"
        page = write_report(loaded, path, "python -m bench report --out FILE", baseline)
    terminal.paths(console, store, plan, page, ended.finished)
    if options.json_output:
        recorded = RunRecord.from_frame(loaded.runs)
        whole = {"gpus_unused": recorded[0].gpus_unused if recorded else None}
        print(json.dumps(_as_json(store, plan, page, results, known, advised) | whole))
    if not ended.finished:
        return 130
    fine = all(c.status in NOT_LAUNCHED or c.ranked or c.expected for c in results)
    return 0 if fine else 1


def _say_what_is_too_wide(
    console: Console, plan: Plan, loaded: Results, results: list[CellResult]
) -> None:
    if plan.precision is None:
        return
    wide = too_wide(loaded.trials, plan.precision)
    names = {cell.cell_id: cell.cell.name for cell in results}
    shares = [f"{names[cell]} ({wide[cell]:.1%})" for cell in wide if cell not in plan.once]
    if shares:
        console.print(
            f"[yellow]interval wider than {plan.precision:.2%}[/yellow]:"
            f" {escape(', '.join(shares))}; the time budget is spent",
            highlight=False,
        )


def _conclusion(
    plan: Plan, ended: Ended, trials: int, known: Precision | None, advised: Answer | None
) -> ConclusionRecord:
    use = advised.advice[0] if advised else None
    return ConclusionRecord(
        schema_version=VERSION,
        run_id=plan.run_id,
        concluded_at=datetime.now(timezone.utc),
        wall_seconds=ended.wall_seconds,
        trials=trials,
        compared_cells=known.cells if known else 0,
        half_width_median=known.median if known else None,
        half_width_nine_in_ten=known.nine_in_ten if known else None,
        advised_cell_id=use.cell.cell_id if use else None,
        advice=use.sentence if use else None,
    )


def _as_json(
    store: Store,
    plan: Plan,
    page: Path | None,
    results: list[CellResult],
    known: Precision | None,
    advised: Answer | None,
) -> dict[str, object]:
    columns = (
        "cell_id",
        "cell_name",
        "status",
        "reason",
        "samples_per_second",
        "peak_memory_bytes",
        "parity_verdict",
    )
    return {
        "run_id": plan.run_id,
        "results": str(store.folder),
        "report": page and str(page),
        "precision": known and dataclasses.asdict(known),
        "answer": [
            {"role": a.role, "cell_id": a.cell.cell_id, "sentence": a.sentence}
            for a in (advised.advice if advised else ())
        ],
        "cells": [{name: cell.column(name) for name in columns} for cell in results],
    }
