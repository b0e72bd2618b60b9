"""Adjustment of step times by the control.

Between steps each rank computes a small fixed piece (harness/worker/control_process.py), whose time
follows the machine's speed. Throughput is compared by the ratio of the step time to the control's.
Nothing is fitted, so that the same ratio holds in another run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """Consecutive timed steps, in logarithms of seconds."""

    step: float
    control: float
    """Mean over the ranks."""


@dataclass(frozen=True)
class Adjustment:
    """Spread of step times between trials, with and without the control."""

    spread_before: float
    """Standard deviation of a cell's log step time between trials."""
    spread_after: float
    """Standard deviation of the log ratio of step time to control time."""

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
    """Returns the spreads of a run, given each cell's trials; zeros if no cell has two."""
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
