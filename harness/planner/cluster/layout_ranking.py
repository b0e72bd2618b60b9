"""The order in which layouts are listed, and tried."""

from __future__ import annotations

import numpy as np
from scipy.special import ndtr, ndtri

from harness.planner.cluster.layouts import Floats, Ints

TIE = 0.01
"""Logarithm of speeds that no measurement of single steps tells apart: of these layouts the one
that needs less memory is preferred."""
TRIED = 3
"""Places of the list whose layouts are chosen to be tried beside each other."""
CONSIDERED = 512
"""Layouts, the fastest by prediction and the first by speed times the probability to fit, that are
considered for the places after the first."""
STEPS, DEVIATIONS = 96, 5.0
"""Points of the integral over speed, and how many standard deviations it spans on both sides."""


def ranked(seconds: Floats, fits: Floats, memory_bytes: Floats, half_width: Floats) -> Ints:
    """Row numbers, best first (all arrays of shape [rows]).

    The first place is for who runs one layout: the largest product of speed and probability to fit,
    in classes of TIE, and within a class the least memory. The next places, up to TRIED, are for
    who tries these layouts and keeps the fastest that ran: each goes to the layout that adds most
    to the expected best speed of those before it (expected improvement: Jones, Schonlau and Welch,
    1998). So a faster layout that may not fit comes second, where a layout that fits as surely as
    the first and is slower would add little. All others follow by speed times probability.

    `half_width` is of the 80 % interval of the logarithm of the seconds; errors, and whether memory
    suffices, are taken as independent between layouts.
    """
    score = np.log(np.maximum(fits, 1e-300) / seconds)
    classes = np.floor((score.max() - score) / TIE) if len(score) else score
    order = np.lexsort((memory_bytes, classes))
    fastest = np.argsort(seconds / np.maximum(fits > 0, 1e-300), kind="stable")
    rows = np.unique(np.concatenate([order[:CONSIDERED], fastest[:CONSIDERED]]))
    picked = order[:1].tolist()
    if len(rows) > 1:
        gains = _Gains(-np.log(seconds[rows]), fits[rows], half_width[rows] / ndtri(0.9))
        places = {int(row): place for place, row in enumerate(rows)}
        best = places[picked[0]]
        for _ in range(min(TRIED, len(rows)) - 1):
            best = gains.after(best)
            picked.append(int(rows[best]))
    rest = order[~np.isin(order, picked)]
    return np.concatenate([np.array(picked, order.dtype), rest])


class _Gains:
    """Expected improvements over what is picked, of layouts with log-normal speeds that are 0 where
    they do not fit."""

    def __init__(self, log_speed: Floats, fits: Floats, deviation: Floats) -> None:
        reach = DEVIATIONS * float(deviation.max())
        grid = np.linspace(log_speed.min() - reach, log_speed.max() + reach, STEPS)
        self.widths = np.diff(np.exp(grid), prepend=0.0)
        """Of each step in speed; the first reaches down to 0."""
        passed = ndtr((grid - log_speed[:, None]) / np.maximum(deviation, 1e-9)[:, None])
        self.slower = 1 - fits[:, None] * (1 - passed)
        """Probability that a layout is slower than each point (shape [rows, STEPS])."""
        self.all_slower = np.ones(STEPS)
        """That all picked ones are."""
        self.not_picked = np.ones(len(log_speed), bool)

    def after(self, picked: int) -> int:
        """The row that adds most, once this one is picked too."""
        self.all_slower = self.all_slower * self.slower[picked]
        self.not_picked[picked] = False
        # E[max(a, b)] - E[b] is the integral of P(a > x) P(b < x) over x.
        gains = (1 - self.slower) @ (self.all_slower * self.widths)
        return int(np.argmax(np.where(self.not_picked, gains, -1.0)))
