"""Rounds beyond the planned ones: for which cells, and until when."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness.analysis.answer import undecided
from harness.analysis.precision import too_wide
from harness.analysis.summary import cell_results
from harness.record.plan import Plan

if TYPE_CHECKING:
    import pandas as pd

FURTHER_SHARE = 0.25
"""Of the time of the planned rounds: what further ones may take where no time budget is given."""


def worth_launching(plan: Plan, trials: pd.DataFrame) -> set[str]:
    """Ids of the cells whose interval is too wide, or that may still be the answer.

    `trials`: of the run so far. Cells that are launched once are never among them.
    """
    if plan.precision is not None:
        return set(too_wide(trials, plan.precision)) - plan.once
    return {cell.cell_id for cell in undecided(cell_results(trials))} - plan.once


def budget_seconds(plan: Plan, first_rounds_seconds: float) -> float:
    """From the run's begin on: the end of the last further round; infinite where there is no
    limit."""
    if plan.time_budget_seconds is not None:
        return plan.time_budget_seconds
    return (1 + FURTHER_SHARE) * first_rounds_seconds if plan.until_answered else math.inf
