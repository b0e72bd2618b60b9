"""Plans a run: a new one, or one to continue."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Iterable, Mapping, Sequence

from bench.expand import expand
from bench.matrix import Matrix, axes_of, host_of, matrix_of, matrix_text, read_matrix
from bench.run_options import CommandOptions
from bench.select import baseline_choice, find_run
from harness.cell.cell import SCRIPT, Cell, is_script
from harness.cell.errors import Refused, Unavailable, UsageError
from harness.record.plan import Plan, matrix_name, require_named, resumable
from harness.record.store import Store, require_plain_name
from harness.run.allocation import launches_per_round, not_compared

FROM_PYTHON = "bench.run"
"""Matrix name of runs whose cells were given in Python."""
_PLAN_INPUTS = (
    "cpu_cores",
    "memory_bytes",
    "gpus",
    "gpu_memory_bytes",
    "git_commit",
    "suite_version",
)
"""Columns of a run on which a plan depends."""


def kept_or_new_plan(store: Store, options: CommandOptions) -> tuple[Plan, bool]:
    """Returns the plan, and whether its run has begun; raises UsageError."""
    plan, begun = _kept_or_new(store, options)
    if begun:
        scripts, matrix = " ".join(options.scripts), matrix_text(options.matrix)
        given = (options.cells, options.changes, options.model, scripts, matrix)
        require_named(plan.cells, map(str, given))
    return plan, begun


def _kept_or_new(store: Store, options: CommandOptions) -> tuple[Plan, bool]:
    if options.resume:
        if options.changes_a_plan:
            raise UsageError(
                "--resume continues a run as it was planned: leave out --only, --skip, --set,"
                " --model, --data, --trials, --timed-seconds and --time-budget"
            )
        if not options.run_id:
            return resumable(store, options.matrix or None), True
        return _continued(store, options, find_run(store, options.run_id)), True
    if options.run_id:
        require_plain_name(options.run_id)
        if options.run_id in store.run_ids():
            return _continued(store, options, options.run_id), True
    if not options.matrix and not options.cells and not options.scripts:
        raise UsageError(
            "--matrix is missing; try --matrix smoke, or see: python -m bench list matrices"
        )
    if options.scripts and (options.matrix or options.cells or options.model or options.data):
        raise UsageError(
            "--script brings its own model and data: leave --matrix, --model and --data out"
        )
    return _new_plan(options), False


def _continued(store: Store, options: CommandOptions, run_id: str) -> Plan:
    """Returns the plan of a run that has begun. Raises UsageError if the options ask for another
    plan."""
    row = store.run_row(run_id)
    plan = Plan.from_row(row)
    if plan.search is not None:
        raise UsageError(
            f"run {run_id!r} is a search, not a run of a matrix: continue it with python -m bench"
            " maxsize --resume, or choose another name with --run"
        )
    requested = _name(options)
    if requested and matrix_name(requested) != matrix_name(plan.matrix):
        raise UsageError(
            f"run {run_id!r} is of matrix {plan.matrix!r}, not {requested!r}: give the same matrix"
            " to continue it, or choose another name with --run"
        )
    if not requested and options.changes_a_plan:
        raise UsageError(
            f"run {run_id!r} continues as planned: leave out options that change it, or repeat"
            " --matrix and the options it began with"
        )
    differing = [] if options.trials in (None, plan.trials) else ["trials"]
    if not differing and options.changes_a_plan and _same_plan_inputs(row, options):
        differing = _differing(plan, options)
    if differing:
        raise UsageError(
            f"run {run_id!r} was planned with different {' and '.join(differing)}: repeat the"
            " options it began with or leave them out, or choose another name with --run"
        )
    return plan


def _same_plan_inputs(row: Mapping[str, object], options: CommandOptions) -> bool:
    """Returns whether the same options would give the same plan as when the run began.

    A plan also depends on the machine, the nodes and the version of the suite.
    """
    from harness.host.environment import environment

    if options.host or (options.nodes or 1) > 1:
        return False
    here = environment()
    return all(row[name] == here[name] for name in _PLAN_INPUTS)


def _differing(plan: Plan, options: CommandOptions) -> list[str]:
    new = _new_plan(options)
    differs = {
        "cells": options.chooses_cells and _cell_ids(new) != _cell_ids(plan),
        "time budget": options.time_budget_seconds is not None
        and new.time_budget_seconds != plan.time_budget_seconds,
        "timed seconds": options.timed_seconds is not None
        and new.timed_seconds != plan.timed_seconds,
    }
    return [name for name, differ in differs.items() if differ]


def _cell_ids(plan: Plan) -> set[str]:
    return {cell.id for cell in (*plan.cells, *(left.cell for left in plan.left_out))}


def _name(options: CommandOptions) -> str:
    """Returns the matrix's name; empty if the options name no cells."""
    return SCRIPT if options.scripts else FROM_PYTHON if options.cells else options.matrix


def _matrix(options: CommandOptions) -> Matrix:
    if options.scripts:
        return _of_scripts(options.scripts)
    if not options.cells:
        return read_matrix(options.matrix)
    axes = [axes_of(cell) if isinstance(cell, Cell) else cell for cell in options.cells]
    return matrix_of({"cells": axes}, Matrix, FROM_PYTHON)


def _of_scripts(scripts: Sequence[str]) -> Matrix:
    cells = []
    for script in scripts:
        path, arguments = "", list[str]()
        with contextlib.suppress(ValueError):  # an open quotation
            path, *arguments = shlex.split(script)
        if not is_script(path):
            example = "give a Python file and its arguments, such as 'train.py lr=0.1'"
            raise UsageError(f"--script {script!r}: {example}")
        options = {"arguments": shlex.join(arguments)} if arguments else {}
        cells.append({"strategy": path, "options": options})
    steps = {"warmup_steps": 3, "parity_steps": 3, "timed_steps": 8}
    defaults = {"workload": SCRIPT, "devices": "many", "batch": 1, **steps}
    content = {"trials": 5, "long_training": False, "defaults": defaults, "cells": cells}
    return matrix_of(content, Matrix, SCRIPT)


def _rehearsed(cells: Iterable[Cell]) -> dict[str, int]:
    """Returns what rank 0 keeps between steps in a rehearsal, in bytes by cell id; leaves out cells
    that cannot be rehearsed."""
    from harness.planner.follow_up import fullest_rank

    found: dict[str, int] = {}
    for cell in cells:
        with contextlib.suppress(UsageError, Refused, Unavailable):
            found[cell.id] = fullest_rank(cell).kept_bytes
    return found


def _new_plan(options: CommandOptions) -> Plan:
    matrix, host = _matrix(options), host_of(options.host, options.nodes or 1)
    name = _name(options)
    expanded = expand(
        matrix,
        host,
        name=name,
        only=options.only,
        skip=options.skip,
        changes=options.changes,
        model=options.model,
    )
    plan = Plan.new(
        name,
        expanded.cells,
        options.trials or matrix.trials_on(host),
        expanded.left_out,
        options.run_id,
        expanded.once,
    )
    seconds, budget = options.timed_seconds, options.time_budget_seconds
    seconds = matrix.timed_seconds if seconds is None else seconds
    plan = dataclasses.replace(
        plan,
        timed_seconds=seconds,
        time_budget_seconds=budget,
        long_training=matrix.long_training and seconds > 0,
        rehearsed=_rehearsed(plan.cells) if matrix.rehearse and not options.dry_run else {},
    )
    chosen = baseline_choice(options.baseline, plan.cells)
    if options.trials or options.scripts or not (plan.trials > 1 or seconds or budget is not None):
        return plan
    if budget is None and matrix.time_budget_minutes:
        budget = matrix.time_budget_minutes * 60
    plan = dataclasses.replace(plan, until_answered=True, time_budget_seconds=budget)
    if not seconds:
        return plan
    compared = [cell for cell in plan.cells if cell.id not in plan.not_compared]
    return dataclasses.replace(
        plan,
        not_compared=plan.not_compared | not_compared(compared, host.cores),
        launches_per_round=launches_per_round(compared, host.cores, chosen),
    )
