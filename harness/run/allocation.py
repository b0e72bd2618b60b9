"""Allocates trials to cells. Baselines take part in many comparisons, so they get more trials;
cells that are compared with nothing get no long ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.setting import SETTING, GroupSize, heading
from harness.host.cores import oversubscribed
from harness.parity.judging import allowed_deviation
from harness.record.plan import Plan
from harness.spec.cell import BASELINE, Cell
from harness.spec.training import EXACT, rounding_alone
from harness.strategy.registry import make_strategy, stand_in_of
from harness.workloads import make_workload


@dataclass(frozen=True)
class PlannedHeadline:
    """Group of cells that will lead a run's report, if they run."""

    cells: tuple[Cell, ...]
    """At least one cell."""
    baseline: Cell | None
    candidates: tuple[Cell, ...]
    """Cells that may be advised: no stand-ins, and declared to train the same as a single
    process."""


def launches_per_round(cells: Sequence[Cell], cores: int | None = None) -> dict[str, int]:
    """Returns cell id -> trials per round, for cells with more than one.

    `cores`: of each node; None: unknown.

    A baseline compared with k cells gets the square root of k, rounded down. This makes the
    intervals of all k ratios narrowest (Dunnett, Journal of the American Statistical Association
    50, 1955, section 5).
    """
    return {
        baseline.id: launches
        for baseline, others in _comparisons(cells, cores)
        if (launches := math.isqrt(len(others))) > 1
    }


def not_compared(cells: Sequence[Cell], cores: int | None = None) -> frozenset[str]:
    """Returns the ids of the cells that are compared with nothing: oversubscribed, expected to
    diverge, or without a baseline in their setting.

    `cores`: of each node; None: unknown.
    """
    comparisons = _comparisons(cells, cores)
    compared = {cell.id for baseline, others in comparisons for cell in (baseline, *others)}
    return frozenset(cell.id for cell in cells) - compared


def _comparisons(cells: Sequence[Cell], cores: int | None) -> list[tuple[Cell, list[Cell]]]:
    return [
        (baseline, [cell for cell in group if cell is not baseline])
        for group in _groups([cell for cell in cells if not _crowded(cell, cores)])
        if (baseline := _planned_baseline(group))
    ]


def planned_headline(plan: Plan, cores: int | None = None) -> PlannedHeadline | None:
    """Returns the group that leads the run if its cells run, chosen as among measured ones; None if
    the plan has no cells to compare, as for a search.

    `cores`: of each node; None: unknown.
    """
    groups = [] if plan.search else _groups(plan.cells)
    number = Counter(cell.workload for cell in plan.cells)
    groups.sort(key=lambda group: -number[group[0].workload])
    index = heading(
        [
            GroupSize(
                timed=any(cell.id not in plan.once for cell in group),
                workload=group[0].workload,
                cells=len(group),
                real=not all(_crowded(cell, cores) for cell in group),
                devices=group[0].devices,
            )
            for group in groups
        ]
    )
    if index is None:
        return None
    group = [cell for cell in groups[index] if not _crowded(cell, cores)] or groups[index]
    return PlannedHeadline(
        tuple(group), _planned_baseline(group), tuple(filter(_may_be_advised, group))
    )


def _groups(cells: Sequence[Cell]) -> list[list[Cell]]:
    settings: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        if cell.expect == "ok":
            settings.setdefault(tuple(getattr(cell, name) for name in SETTING), []).append(cell)
    return list(settings.values())


def _crowded(cell: Cell, cores: int | None) -> bool:
    return oversubscribed(cell, None if cores is None else cell.nodes * cores)


def _may_be_advised(cell: Cell) -> bool:
    strategy, workload = make_strategy(cell), make_workload(cell.workload)
    if stand_in_of(strategy, cell, workload):
        return False
    allowed = allowed_deviation(cell, workload, strategy, strategy.layout(cell.devices))
    return allowed == EXACT or rounding_alone(cell.precision, allowed.reason)


def _planned_baseline(cells: Sequence[Cell]) -> Cell | None:
    """Returns DDP by torchrun without options, else the single process, as
    harness/analysis/baseline.py does for measured cells."""
    plain = [cell for cell in cells if cell.plain and not cell.options]
    ddp = (cell for cell in plain if make_strategy(cell).ddp_equivalent_of(cell) == "torchrun")
    single = (cell for cell in plain if cell.strategy == BASELINE)
    return next(ddp, None) or next(single, None)
