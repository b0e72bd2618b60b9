"""Simulates whole races, and counts how often the printed interval of their winner's gain holds.

`.venv/bin/python -m docs.studies.race_coverage [RUNS]` simulates RUNS races (20,000) per
situation, all at once: one separate trial of each cell (seven of the baseline), a heat for each
contender, then drawn heats until the race is decided or its time is over. Estimates and rules are
those of harness/analysis/race.py with two simplifications: a cell's error is that of as many
independent trials, and two cells count as decided at 2.2 standard errors. The final statements come
from the suite itself: `joined`, `against_best` and `gains`. Trials differ by NOISE within a heat,
as in the kept run, and cells by what the allowances stand for. A third of the cells is started
apart from the fork server.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any, TypeAlias

import numpy as np

from harness.analysis.race import (
    APART_ALLOWANCE,
    FAR_BEHIND,
    GAIN_ERROR,
    HEAT_ALLOWANCE,
    joined,
)
from harness.analysis.ranking import against_best, gains
from harness.analysis.stats import EQUAL, LogEstimate

NOISE = float(os.environ.get("NOISE", "0.0132"))
"""Standard deviation of a trial in a heat: 1.9% of a ratio in the kept run."""
SEPARATE = 0.03
DEGREES = 20.0
"""Standard deviation of a separate trial, and its degrees of freedom."""
CELLS, IN_HEAT, MOST_HEATS = 13, 4, int(os.environ.get("HEATS", "45"))
"""Cells with the baseline (the first), cells of a heat, and heats for which there is time."""
Array: TypeAlias = "np.ndarray[Any, Any]"
SITUATIONS = {
    "a clear winner": [-0.1, 0.0, *[-0.06] * (CELLS - 2)],
    "12 cells within 3%": [-0.05, *np.linspace(0.0, -0.03, CELLS - 1)],
    "all equal": [0.0] * CELLS,
}


class Races:
    """State of all races. Arrays have one row per race, `heats` one per race and heat."""

    def __init__(self, true: list[float], runs: int, chance: np.random.Generator) -> None:
        self.chance = chance
        self.apart = chance.random((runs, CELLS)) < 1 / 3
        self.apart[:, 0] = False
        effects = np.hypot(HEAT_ALLOWANCE, APART_ALLOWANCE * self.apart)
        self.measured = np.array(true) + effects * chance.normal(size=(runs, CELLS))
        self.number = np.array([7] + [1] * (CELLS - 1))
        noise = chance.normal(size=(runs, CELLS)) * SEPARATE / np.sqrt(self.number)
        self.separate = self.measured + noise
        self.members = np.zeros((runs, MOST_HEATS, CELLS), bool)
        self.values = np.zeros((runs, MOST_HEATS, CELLS))
        self.heats = np.zeros(runs, int)

    def race(self, races: Array, members: Array) -> None:
        """Adds a heat of these members to each of these races."""
        noise = NOISE * self.chance.normal(size=members.shape)
        at = self.heats[races]
        self.members[races, at] = members
        self.values[races, at] = (self.measured[races] + noise) * members
        self.heats[races] += 1

    def estimates(self, races: Array) -> tuple[Array, Array, Array, Array]:
        """Returns means, errors, degrees of freedom and the error of each gain."""
        members, values = self.members[races].astype(float), self.values[races]
        sizes = np.maximum(members.sum(axis=2, keepdims=True), 1)
        centred = (values - values.sum(axis=2, keepdims=True) / sizes) * members
        trials = members.sum(axis=1)
        shared = np.einsum("rhi,rhj->rij", members / sizes, members)
        information = trials[:, :, None] * np.eye(CELLS) - shared
        seen = trials > 0
        # Cells outside heats keep their separate estimates.
        information[:, range(CELLS), range(CELLS)] += np.where(seen, 1e-6, 1.0)
        sums = centred.sum(axis=1)
        inverse = np.linalg.inv(information)
        means = np.einsum("rij,rj->ri", inverse, sums)
        squares = (centred**2).sum(axis=(1, 2)) - (means * sums).sum(axis=1)
        degrees = trials.sum(axis=1) - seen.sum(axis=1) - (sizes[:, :, 0] > 1).sum(axis=1) + 1
        known = degrees >= 4
        variance = np.where(known, np.maximum(squares, 0) / np.maximum(degrees, 1), SEPARATE**2)
        means = np.where(
            seen, means - means[:, :1], self.separate[races] - self.separate[races, :1]
        )
        number = np.where(seen, trials, self.number)
        errors = np.sqrt(np.where(seen, variance[:, None], SEPARATE**2) / number)
        diagonal = inverse[:, range(CELLS), range(CELLS)]
        of_gain = diagonal + diagonal[:, :1] - 2 * inverse[:, 0]
        gain_errors = np.sqrt(variance[:, None] * np.maximum(of_gain, 0))
        return means, errors, np.where(known, degrees, DEGREES), gain_errors

    def contenders(self, means: Array, errors: Array) -> Array:
        best = means.argmax(axis=1)[:, None]
        apart = np.hypot(errors, np.take_along_axis(errors, best, 1))
        return np.take_along_axis(means, best, 1) - means <= FAR_BEHIND * apart

    def drawn(self, means: Array, errors: Array, degrees: Array, racing: Array) -> Array:
        """Returns the members of each race's next heat: the baseline and up to three draws."""
        members = np.zeros(means.shape, bool)
        members[:, 0] = True
        for _ in range(12):
            scale = self.chance.gamma(degrees / 2, 2 / degrees)[:, None]
            scores = means + errors * self.chance.normal(size=means.shape) / np.sqrt(scale)
            first = np.where(racing, scores, -np.inf).argmax(axis=1)
            full = members.sum(axis=1) >= IN_HEAT
            members[~full, first[~full]] = True
        return members

    def run(self) -> None:
        everything = np.arange(len(self.heats))
        means, errors = self.separate, SEPARATE / np.sqrt(self.number) * np.ones_like(self.separate)
        racing = self.contenders(means, errors)
        racing[:, 0] = False
        order = racing.cumsum(axis=1) - 1
        for heat in range(math.ceil((CELLS - 1) / (IN_HEAT - 1))):
            members = racing & (order // (IN_HEAT - 1) == heat)
            some = members.any(axis=1)
            members[:, 0] = True
            self.race(everything[some], members[some])
        races = everything
        while len(races := races[self.heats[races] < MOST_HEATS]):
            means, errors, degrees, gain_errors = self.estimates(races)
            ranked = np.argsort(-means, axis=1)[:, :2]
            first, second = (np.take_along_axis(means, ranked, 1)).T
            apart = 2.2 * np.hypot(*np.take_along_axis(errors, ranked, 1).T)
            winner = np.take_along_axis(gain_errors, ranked[:, :1], 1)[:, 0]
            undecided = (first - second < apart) & (first - second + apart > EQUAL)
            open_ = (winner > GAIN_ERROR) | undecided
            members = self.drawn(means, errors, degrees, self.contenders(means, errors))
            races, members = races[open_], members[open_]
            alone = members.sum(axis=1) < 2
            members[
                alone, np.where(ranked[open_][alone, 0] == 0, *ranked[open_][alone].T[::-1])
            ] = True
            self.race(races, members)


def printed(races: Races, race: int, true: list[float]) -> tuple[bool, float, float] | None:
    """Returns whether the winner's interval holds its true gain, its half width, and the regret;
    None if the baseline wins."""
    separate = {
        str(cell): LogEstimate(value, SEPARATE / math.sqrt(races.number[cell]), DEGREES, 1)
        for cell, value in enumerate(races.separate[race])
    }
    heats = [
        {str(cell): float(values[cell]) for cell in np.flatnonzero(members)}
        for members, values in zip(races.members[race], races.values[race], strict=True)
        if members.any()
    ]
    apart = {str(cell) for cell in np.flatnonzero(races.apart[race])}
    cells = separate | joined(separate, heats, apart)[0]
    winner = max(cells, key=lambda name: cells[name].mean)
    regret = max(true) - true[int(winner)]
    if winner == "0":
        return None
    bounds = zip(cells, against_best([*cells.values()]), strict=True)
    tied = {name for name, bound in bounds if bound.may_be_best}
    near = sorted(tied - {"0", winner})
    gain = gains(cells["0"], [cells[winner], *(cells[name] for name in near)])[0]
    assert gain.low is not None
    assert gain.high is not None
    holds = gain.low <= math.exp(true[int(winner)] - true[0]) <= gain.high
    return holds, (gain.high - gain.low) / 2 / gain.ratio, regret


def main(runs: str = "20000") -> None:
    for name, true in SITUATIONS.items():
        races = Races(true, int(runs), np.random.default_rng(1))
        races.run()
        found = [one for race in range(int(runs)) if (one := printed(races, race, true))]
        held, widths, regrets = zip(*found, strict=True)
        print(
            f"{name}: {np.mean(held):.2%} of {len(found)} intervals hold, half width"
            f" {np.median(widths):.2%}, mean regret {np.mean(regrets):.2%},"
            f" {np.median(races.heats):.0f} heats",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
