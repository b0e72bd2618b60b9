"""The plan of bench run, resumed or new."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from bench.expand import expand
from bench.host import host_of
from bench.matrix import parse_changes, read_matrix
from harness.record.plan import Plan, kept_plan, resumable
from harness.record.store import Store, require_plain_name
from harness.run.allocation import launches_per_round, not_compared
from harness.spec.errors import UsageError


@dataclass(frozen=True)
class PlanOptions:
    matrix: str
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    trials: int | None = None
    precision: str = ""
    time_budget: str = ""
    by_turns: bool = False
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
            or self.by_turns
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
                "--resume goes on with a run as it was planned: leave --only, --skip, --set,"
                " --trials, --timed-seconds, --precision and --by-turns out"
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
    elif not options.trials and not options.by_turns:
        budget = parse_time(options.time_budget) if options.time_budget else None
        if budget is None and matrix.time_budget_minutes:
            budget = matrix.time_budget_minutes * 60
        plan = dataclasses.replace(plan, until_answered=True, time_budget_seconds=budget)
    if not options.by_turns:
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
        plan = dataclasses.replace(plan, by_turns=True)
    return plan


def parse_share(text: str) -> tuple[int, int]:
    """Parses `1/4` to (1, 4): a run's share of cells, counted from 0, and the number of shares.
    Raises UsageError."""
    match = re.fullmatch(r"(\d+)/(\d+)", text or "0/1")
    if not match or int(match[1]) >= int(match[2]):
        raise UsageError(f"--share {text!r} is no share; the second of four is 1/4")
    return int(match[1]), int(match[2])


def parse_precision(text: str) -> float:
    """Parses `2%` to 0.02; raises UsageError outside 0 to 100 %."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if not match or not 0 < float(match[1]) < 100:
        raise UsageError(
            f"--precision {text!r} is not a share; give half the width of the interval over the"
            " throughput, like 2%"
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
    """Raises UsageError for cells that cannot train interleaved."""
    from harness.host.environment import gpus
    from harness.launch.interleaved import MOST_CELLS
    from harness.run.expected import too_large_together

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
    if not on_gpus or not (devices := gpus()):
        return
    if reason := too_large_together(on_gpus, min(size for _, size in devices)):
        raise UsageError(f"--by-turns: {reason} (--skip CELL, --set batch=N)")
