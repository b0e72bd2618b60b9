from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from harness.analysis.answer import entrants
from harness.analysis.race import next_heats
from harness.analysis.ranking import Choice, additions
from harness.analysis.setting import GroupSize, Setting, heading, timed
from harness.analysis.summary import summarised
from harness.cell.cell import BASELINE, Cell
from harness.cell.training import EXACT, half_precision, rounding_alone
from harness.host.cores import oversubscribed
from harness.parity.verdict import allowed_deviation
from harness.record.plan import Plan
from harness.record.store import EndedTrial
from harness.record.trial import TrialRecord
from harness.seam.registry import make_strategy, stand_in_of
from harness.workloads import make_workload


def launches_per_round(
    cells: Sequence[Cell], cores: int | None = None, chosen: Choice | None = None
) -> dict[str, int]:
    """Returns the trials per round by cell id, for cells with more than one trial. A baseline
    compared with k cells gets the square root of k, rounded down, which makes all k intervals
    narrowest (Dunnett, JASA 50, 1955, section 5). `chosen`: see `baseline_of`."""
    return {
        baseline.id: launches
        for group in _compared(cells, cores)
        if (launches := math.isqrt(len(group) - 1)) > 1
        and (baseline := _planned_baseline(group, chosen))
    }


def not_compared(cells: Sequence[Cell], cores: int | None = None) -> frozenset[str]:
    """Returns ids of cells that are oversubscribed, expected to diverge, or alone in their setting.
    A setting's baseline is not among them."""
    compared = {cell.id for group in _compared(cells, cores) for cell in group}
    return frozenset(cell.id for cell in cells) - compared


def _compared(cells: Sequence[Cell], cores: int | None) -> list[list[Cell]]:
    """Returns the groups of cells that a report ranks, and baselines that are alone, to which
    scaling efficiencies may refer."""
    groups = _groups([cell for cell in cells if not _crowded(cell, cores)])
    return [group for group in groups if len(group) > 1 or _planned_baseline(group)]


def planned_headline(
    plan: Plan, cores: int | None = None, chosen: Choice | None = None
) -> tuple[list[Cell], Cell | None] | None:
    """Returns the cells that will lead the report, and their baseline; None if no cells can be
    compared. `chosen`: see `baseline_of`."""
    groups = [] if plan.search else _groups(plan.cells)
    number = Counter(cell.workload for cell in plan.cells)
    groups.sort(key=lambda group: -number[group[0].workload])
    index = heading(
        [
            GroupSize(
                timed=any(cell.id not in plan.not_compared for cell in group),
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
    return group, _planned_baseline(group, chosen)


def _groups(cells: Sequence[Cell]) -> list[list[Cell]]:
    settings: dict[Setting, list[Cell]] = {}
    for cell in cells:
        if cell.expect == "ok":
            settings.setdefault(Setting.of(cell), []).append(cell)
    return list(settings.values())


def _crowded(cell: Cell, cores: int | None) -> bool:
    return oversubscribed(cell, None if cores is None else cell.nodes * cores)


def may_be_advised(cell: Cell) -> bool:
    """Returns whether a cell has no stand-in, and is declared to train like one process."""
    strategy, workload = make_strategy(cell), make_workload(cell.workload)
    if stand_in_of(strategy, cell, workload):
        return False
    allowed = allowed_deviation(cell, workload, strategy, strategy.layout(cell.devices))
    half = half_precision(cell.precision, cell.workload)
    return allowed == EXACT or rounding_alone(half, allowed.reason)


def _planned_baseline(cells: Sequence[Cell], chosen: Choice | None = None) -> Cell | None:
    if chosen is not None:
        return min(filter(chosen, cells), key=additions, default=None)
    plain = [cell for cell in cells if cell.plain and not cell.options]
    ddp = [cell for cell in plain if make_strategy(cell).ddp_equivalent_of(cell) == "torchrun"]
    single = [cell for cell in plain if cell.strategy == BASELINE]
    alone = any(cell.devices == 1 for cell in single)
    return next(iter([*single, *ddp] if alone else [*ddp, *single]), None)


HEADLINE_SHARE = 0.9
"""Fraction of the time budget after which other settings race, too, though the headline is open."""
FURTHER_SHARE = 0.25
"""If there is no time budget, extra rounds may take this fraction of the planned rounds' time."""


def worth_launching(
    plan: Plan,
    trials: Sequence[TrialRecord],
    baseline: Choice | None = None,
    headline_only: bool = False,
) -> list[tuple[str, ...]]:
    """Returns the next heats of the race by cell id; empty if nothing is open. `headline_only`:
    whether other settings wait until the headline is decided."""
    settings = entrants(timed(summarised(trials, baseline), plan.not_compared))
    planned = planned_headline(plan, chosen=baseline)
    leading = {cell.id for cell in planned[0]} if planned else set()
    settings.sort(key=lambda of: (leading.isdisjoint(of.speeds), -len(of.speeds)))
    return next_heats(settings, random.Random(plan.order_seed + len(trials)), headline_only)


class TimeBudget:
    def __init__(
        self, plan: Plan, now: Callable[[], float], before: Iterable[EndedTrial] = ()
    ) -> None:
        """`before`: trials that earlier processes of this run recorded."""
        self.plan, self.now, self.began = plan, now, now()
        order = plan.schedule()
        self.spare = range(plan.spare_from, len(order))
        planned = {(cell.id, trial) for cell, trial in order}
        self.planned_before, self.further_before = 0.0, 0.0
        for trial in before:
            if (trial.cell_id, trial.trial) in planned:
                self.planned_before += trial.wall_seconds or 0.0
            else:
                self.further_before += trial.wall_seconds or 0.0
        self.first_rounds_seconds: float | None = None
        self.took: dict[str, float] = {}
        self.left_out = 0

    def leaves_out(self, position: int, cell: Cell, still_planned: Iterable[Cell]) -> bool:
        """Returns whether to drop a planned trial, because it and all shorter trials together
        exceed the remaining time. `still_planned`: the cell of each trial that is not launched
        yet."""
        if position not in self.spare:
            return False
        budget = self.plan.time_budget_seconds or math.inf
        seconds_left = budget - (self.now() - self.began)
        durations = map(self._seconds, still_planned)
        needed = sum(seconds for seconds in durations if seconds <= self._seconds(cell))
        late = needed > seconds_left
        self.left_out += late
        return late

    def _seconds(self, cell: Cell) -> float:
        return self.took.get(cell.id, 0.0)

    def for_headline(self) -> bool:
        """Returns whether the headline's share of the time is not yet spent."""
        return self.now() - self.began < HEADLINE_SHARE * self._most_seconds()

    def shortest_that_fit(self, seconds: Mapping[str, float], reserved: float = 0.0) -> set[str]:
        """Returns ids of the shortest cells that fit the remaining time. `seconds`: by cell id.
        `reserved`: seconds of it that planned trials need."""
        seconds_left = self._most_seconds() - (self.now() - self.began) - reserved
        shortest_first = sorted(seconds, key=seconds.__getitem__)
        until = itertools.accumulate(seconds[cell_id] for cell_id in shortest_first)
        return {
            cell_id
            for cell_id, end in zip(shortest_first, until, strict=True)
            if end <= seconds_left
        }

    def _most_seconds(self) -> float:
        if self.plan.time_budget_seconds is not None:
            return self.plan.time_budget_seconds
        if not self.plan.until_answered:
            return math.inf
        if self.first_rounds_seconds is None:
            self.first_rounds_seconds = self.planned_before + self.now() - self.began
        before = self.planned_before + self.further_before
        return (1 + FURTHER_SHARE) * self.first_rounds_seconds - before
