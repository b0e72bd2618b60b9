"""How the launches of a run are shared among its cells, so that the time goes where it tells
something: throughputs are compared with those of a baseline, of which all comparisons need more
launches, and what is compared with nothing needs no long ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.analysis.setting import SETTING
from harness.host.cores import oversubscribed
from harness.spec.cell import BASELINE, Cell
from harness.strategy.registry import make_strategy


def launches_per_round(cells: Sequence[Cell]) -> dict[str, int]:
    """Cell id -> launches in each round, of the cells that have more than one.

    A baseline that k cells are compared with has the square root of k, rounded down: what makes
    the intervals of all k ratios narrowest (Dunnett, Journal of the American Statistical
    Association 50, 1955, section 5).
    """
    return {
        baseline.id: launches
        for baseline, others in _comparisons(cells)
        if (launches := math.isqrt(len(others))) > 1
    }


def not_compared(cells: Sequence[Cell]) -> frozenset[str]:
    """Ids of the cells whose throughput is compared with nothing: they have more ranks than there
    are cores, are expected to diverge, or have no baseline in their setting."""
    compared = {cell.id for baseline, others in _comparisons(cells) for cell in (baseline, *others)}
    return frozenset(cell.id for cell in cells) - compared


def _comparisons(cells: Sequence[Cell]) -> list[tuple[Cell, list[Cell]]]:
    """The baseline of each setting that has one, and the cells that are compared with it."""
    settings: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        if cell.expect == "ok" and not oversubscribed(cell):
            settings.setdefault(tuple(getattr(cell, name) for name in SETTING), []).append(cell)
    return [
        (baseline, [cell for cell in group if cell is not baseline])
        for group in settings.values()
        if (baseline := _planned_baseline(group))
    ]


def _planned_baseline(cells: Sequence[Cell]) -> Cell | None:
    """DDP by torchrun without options, else the single process: see harness/analysis/baseline.py,
    which chooses among what was measured."""
    plain = [
        cell
        for cell in cells
        if cell.micro_batches == 1 and cell.recompute == "none" and not cell.options
    ]
    ddp = (cell for cell in plain if make_strategy(cell).same_as_ddp(cell) == "torchrun")
    single = (cell for cell in plain if cell.strategy == BASELINE)
    return next(ddp, None) or next(single, None)
