"""What the control of a run's trials takes out of their step times.

Between steps each rank computes a small fixed piece (harness/worker/control.py), whose time moves
with the machine's speed. The logarithm of a trial's step time is regressed on those of the control
(control variates: Lavenberg and Welch, Management Science 27, 1981), with coefficients that all
cells of a run share.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

LEAST_WINDOWS = 12
"""Fewer, beyond one for each cell, say nothing of a coefficient."""
LEAST_LAUNCHES = 40
"""With so many launches, beyond one for each cell, the coefficients are those between whole
launches. The control's own noise, which averages out over a launch, makes those between windows of
a few steps too small."""


@dataclass(frozen=True)
class Window:
    """Some timed steps in a row: logarithms of seconds."""

    step: float
    control: float
    """Mean over the ranks."""
    slowest: float
    """Of the rank whose control took longest."""


@dataclass(frozen=True)
class Adjustment:
    """By which powers of the control's times the step times are divided."""

    control: float
    slowest: float
    spread_before: float
    """Standard deviation of the logarithm of a cell's step time between its launches."""
    spread_after: float

    @property
    def helps(self) -> bool:
        return self.spread_after < self.spread_before

    @property
    def spreads(self) -> tuple[float, float]:
        """Before and after."""
        return self.spread_before, self.spread_after

    def of(self, window: Window, usual: Window) -> float:
        """What is taken off the logarithm of a step time; `usual`: the control's usual times."""
        return self.control * (window.control - usual.control) + self.slowest * (
            window.slowest - usual.slowest
        )


NONE = Adjustment(0.0, 0.0, 0.0, 0.0)


def mean_window(windows: Sequence[Window]) -> Window:
    """Several windows as one."""
    return Window(
        *(
            statistics.fmean(values)
            for values in zip(*((w.step, w.control, w.slowest) for w in windows), strict=True)
        )
    )


def usual_control(windows: Sequence[Window]) -> Window:
    """The control's median times."""
    return Window(
        0.0,
        statistics.median(w.control for w in windows),
        statistics.median(w.slowest for w in windows),
    )


def fitted(cells: Mapping[Hashable, Sequence[Sequence[Window]]]) -> Adjustment:
    """The adjustment that the launches of a run say is best.

    `cells`: by cell the windows of each of its launches. It is NONE where there are too few of
    them, and where the cells' launches spread no less with it.
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
        # One launch of each cell: what it does between them is not known.
        return NONE
    fit = Adjustment(fit.control, fit.slowest, before, after)
    return fit if fit.helps else Adjustment(0.0, 0.0, before, before)


def _spread(
    cells: Mapping[Hashable, Sequence[Sequence[Window]]], adjustment: Adjustment
) -> float | None:
    """Standard deviation between the launches of a cell, pooled over the cells; None where none has
    two launches."""
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
