"""Selects cells for rounds beyond the planned ones, and decides when to stop."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from harness.analysis.answer import undecided
from harness.analysis.precision import (
    MEDIAN_WANTED,
    NINE_IN_TEN_WANTED,
    not_known_well,
    too_wide,
)
from harness.analysis.setting import timed
from harness.analysis.summary import cell_results
from harness.record.plan import Plan
from harness.spec.cell import Cell

if TYPE_CHECKING:
    import pandas as pd

FURTHER_SHARE = 0.25
"""Time for further rounds relative to the planned ones, without a time budget."""


class FurtherRound(NamedTuple):
    cell_ids: set[str]
    why: str
    """Continuation of `cells that`."""


def worth_launching(plan: Plan, trials: pd.DataFrame) -> FurtherRound:
    """Returns the cells whose interval is too wide, or that may still be the answer.

    With a time budget, all compared cells come first until they are precise enough. Cells that run
    once are never selected. `trials`: of the run so far.
    """
    if plan.precision is not None:
        wide = set(too_wide(trials, plan.precision))
        return FurtherRound(wide - plan.once, "have too wide an interval")
    cells = timed(cell_results(trials), plan.once)
    compared = not_known_well(cells) if plan.time_budget_seconds is not None else set()
    if compared:
        why = f"are compared: half of their intervals are wider than ±{MEDIAN_WANTED:.0%}"
        why += f", or a tenth wider than ±{NINE_IN_TEN_WANTED:.0%}"
        return FurtherRound(compared, why)
    best = {cell.cell_id for cell in undecided(cells)}
    return FurtherRound(best, "may still be the fastest, or are compared with these")


class TimeBudget:
    """Remaining time of a run, counted from its start."""

    def __init__(self, plan: Plan, now: Callable[[], float]) -> None:
        """`now`: a clock in seconds."""
        self.plan, self.now, self.began = plan, now, now()
        self.order = plan.schedule()
        self.spare = range(plan.spare_from, len(self.order))
        """Positions of the trials that may be dropped."""
        self.first_rounds_seconds: float | None = None
        """Duration of the planned rounds; None before their end."""
        self.took: dict[str, float] = {}
        self.left_out = 0
        """Number of planned trials dropped for lack of time."""

    def leaves_out(self, position: int, cell: Cell) -> bool:
        """Returns whether to drop a planned trial: the remaining time does not fit it and all
        shorter ones. Dropping the longest first makes most cells precise."""
        if position not in self.spare:
            return False
        budget = self.plan.time_budget_seconds or math.inf
        seconds_left = budget - (self.now() - self.began)
        still_planned = (self._seconds(other) for other, _ in self.order[position:])
        needed = sum(seconds for seconds in still_planned if seconds <= self._seconds(cell))
        late = needed > seconds_left
        self.left_out += late
        return late

    def _seconds(self, cell: Cell) -> float:
        return self.took.get(cell.id, 0.0)

    def shortest_that_fit(self, seconds: Mapping[str, float]) -> set[str]:
        """Returns the cells of a further round that fit in the remaining time, shortest first.

        `seconds`: duration of a trial by cell id.
        """
        spent = self.now() - self.began
        if self.first_rounds_seconds is None:
            self.first_rounds_seconds = spent
        seconds_left = self._most_seconds(self.first_rounds_seconds) - spent
        shortest_first = sorted(seconds, key=seconds.__getitem__)
        until = itertools.accumulate(seconds[cell_id] for cell_id in shortest_first)
        return {
            cell_id
            for cell_id, end in zip(shortest_first, until, strict=True)
            if end <= seconds_left
        }

    def _most_seconds(self, first_rounds_seconds: float) -> float:
        if self.plan.time_budget_seconds is not None:
            return self.plan.time_budget_seconds
        return (1 + FURTHER_SHARE) * first_rounds_seconds if self.plan.until_answered else math.inf
