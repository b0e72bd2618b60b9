"""Adjusts step times by the control, a small fixed computation between steps that shows the
machine's speed (harness/worker/control_process.py). Nothing is fitted, so adjusted times carry over
to other runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """Log mean seconds over consecutive timed steps."""

    step: float
    control: float


@dataclass(frozen=True)
class Adjustment:
    spread_before: float
    """Standard deviation of log step time between trials."""
    spread_after: float

    @property
    def helps(self) -> bool:
        """Whether the control reduces the spread; otherwise it is not used."""
        return self.spread_after < self.spread_before


NONE = Adjustment(0.0, 0.0)


def mean_window(windows: Sequence[Window]) -> Window:
    return Window(
        statistics.fmean(window.step for window in windows),
        statistics.fmean(window.control for window in windows),
    )


def adjustment(cells: Mapping[str, Sequence[Window]]) -> Adjustment:
    """Returns zeros if no cell has two trials."""
    before, after, degrees = 0.0, 0.0, 0
    for trials in cells.values():
        if len(trials) < 2:
            continue
        repeats = len(trials) - 1
        before += repeats * statistics.variance(trial.step for trial in trials)
        after += repeats * statistics.variance(trial.step - trial.control for trial in trials)
        degrees += repeats
    if not degrees:
        return NONE
    return Adjustment(math.sqrt(before / degrees), math.sqrt(after / degrees))
