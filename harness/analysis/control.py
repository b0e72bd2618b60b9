"""Adjustment of step times by the control.

Between steps each rank computes a small fixed piece (harness/worker/control_process.py), whose time
follows the machine's speed. Log step times are regressed on it (control variates: Lavenberg and
Welch, Management Science 27, 1981), with coefficients shared by a run's cells.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

LEAST_WINDOWS = 12
"""Fewest windows for a fit, beyond one per cell."""
LEAST_LAUNCHES = 40
"""Trials, beyond one per cell, from which fits use whole trials. Within windows of a few steps, the
control's noise does not average out and shrinks coefficients."""


@dataclass(frozen=True)
class Window:
    """Consecutive timed steps, in logarithms of seconds."""

    step: float
    control: float
    """Mean over the ranks."""
    slowest: float


@dataclass(frozen=True)
class Adjustment:
    """Powers of the control times by which step times are divided."""

    control: float
    slowest: float
    spread_before: float
    """Standard deviation of a cell's log step time between trials."""
    spread_after: float

    @property
    def helps(self) -> bool:
        return self.spread_after < self.spread_before

    @property
    def spreads(self) -> tuple[float, float]:
        return self.spread_before, self.spread_after

    def of(self, window: Window, usual: Window) -> float:
        """Returns what to subtract from a log step time. `usual`: the control's usual times."""
        return self.control * (window.control - usual.control) + self.slowest * (
            window.slowest - usual.slowest
        )


NONE = Adjustment(0.0, 0.0, 0.0, 0.0)


def mean_window(windows: Sequence[Window]) -> Window:
    return Window(
        *(
            statistics.fmean(values)
            for values in zip(*((w.step, w.control, w.slowest) for w in windows), strict=True)
        )
    )


def usual_control(windows: Sequence[Window]) -> Window:
    return Window(
        0.0,
        statistics.median(w.control for w in windows),
        statistics.median(w.slowest for w in windows),
    )


def fitted(cells: Mapping[Hashable, Sequence[Sequence[Window]]]) -> Adjustment:
    """Returns the best adjustment for a run, given each cell's windows by trial.

    It is zero with too few windows, or if it does not reduce the spread between trials.
    """
    import numpy as np

    launch_means = {
        cell: [mean_window(launch) for launch in launches if launch]
        for cell, launches in cells.items()
    }
    beyond_one = sum(max(0, len(launches) - 1) for launches in launch_means.values())
    rows: list[tuple[float, float, float]] = []
    for cell, launches in cells.items():
        windows = [window for launch in launches for window in launch]
        if beyond_one >= LEAST_LAUNCHES:
            windows = launch_means[cell]
        if not windows:
            continue
        middle = mean_window(windows)
        rows += [
            (w.step - middle.step, w.control - middle.control, w.slowest - middle.slowest)
            for w in windows
        ]
    if len(rows) < len(cells) + LEAST_WINDOWS:
        return NONE
    table = np.array(rows)
    (control, slowest), *_ = np.linalg.lstsq(table[:, 1:], table[:, 0], rcond=None)
    fit = Adjustment(float(control), float(slowest), 0.0, 0.0)
    before, after = (_spread(cells, candidate) for candidate in (NONE, fit))
    if before is None or after is None:
        # With one trial per cell, the spread between trials is unknown.
        return NONE
    fit = Adjustment(fit.control, fit.slowest, before, after)
    return fit if fit.helps else Adjustment(0.0, 0.0, before, before)


def _spread(
    cells: Mapping[Hashable, Sequence[Sequence[Window]]], adjustment: Adjustment
) -> float | None:
    """Returns the standard deviation between trials, pooled over cells; None without repeats."""
    squares, degrees = 0.0, 0
    zero = Window(0.0, 0.0, 0.0)
    for launches in cells.values():
        means = [mean_window(windows) for windows in launches if windows]
        if len(means) < 2:
            continue
        values = [mean.step - adjustment.of(mean, zero) for mean in means]
        squares += statistics.variance(values) * (len(values) - 1)
        degrees += len(values) - 1
    return math.sqrt(squares / degrees) if degrees else None
