"""How often a run of this design is right, by resampling a recorded run's noise.

`.venv/bin/python -m scripts.power RESULTS [RUN]` simulates runs of the recorded run's largest
setting: one trial of each cell, then the race, with as many trials as were recorded. The noise is
the recorded trials' deviations from their cells' means, after the control. They keep their order
but are shifted by a random number of places, which preserves heavy tails, slow spells and what
neighbours share.

Prints how often the best cell is picked, what a wrong choice costs and how large the set of the
best is. It also prints the half width of the best cell's gain, with and without the allowance for
the control. Each for a clear winner, for many close cells, and for cells that are all equal.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from harness.analysis.answer import trustworthy
from harness.analysis.estimates import FORKED_ALLOWANCE, Spread, estimates_of, moderated
from harness.analysis.race import contenders, top_two
from harness.analysis.ranking import against_best, gains
from harness.analysis.setting import Setting
from harness.analysis.stats import CONFIDENCE, LogEstimate
from harness.analysis.summary import cell_results
from harness.record.store import Store
from harness.record.trial import TrialRecord
from harness.run.allocation import MOST_DRAWS, RACE_ROUNDS

RUNS = int(os.environ.get("RUNS", "500"))
NOISE = float(os.environ.get("NOISE", "0"))
"""Standard deviation to which the noise is scaled; 0: as recorded."""
Throughputs = Mapping[str, float]


class Design:
    """A recorded run's largest setting, and its noise."""

    def __init__(self, folder: str, run_id: str) -> None:
        store = Store(folder)
        trials = store.load([run_id or store.run_ids()[-1]], steps=False).trials
        finished = [
            trial
            for trial in TrialRecord.from_frame(trials)
            if trial.samples_per_second is not None and not trial.oversubscribed
        ]
        finished.sort(key=lambda trial: trial.position)
        adjusted = estimates_of(finished).by_trial
        logs: dict[str, list[float]] = defaultdict(list)
        for trial in finished:
            logs[trial.cell_id].append(math.log(adjusted[trial.cell_id, trial.trial]))
        noise = [
            (math.log(adjusted[trial.cell_id, trial.trial]) - statistics.fmean(own))
            * math.sqrt(len(own) / (len(own) - 1))
            for trial in finished
            if len(own := logs[trial.cell_id]) > 1
        ]
        self.spread = statistics.pstdev(noise)
        self.noise = [x * (NOISE / self.spread if NOISE else 1.0) for x in noise]
        groups: dict[Setting, list[str]] = defaultdict(list)
        for cell in trustworthy(cell_results(trials)):
            if cell.parity.same_training and cell.cell_id in logs:
                groups[Setting.of(cell.cell)].append(cell.cell_id)
        self.group = max(groups.values(), key=len)
        recorded = [trial for trial in finished if trial.cell_id in self.group]
        self.trials = len(recorded)
        self.baseline = max(self.group, key=lambda cell: len(logs[cell]))
        means = {cell: statistics.fmean(logs[cell]) for cell in self.group}
        self.levels = {cell: mean - max(means.values()) for cell, mean in means.items()}

    def simulated(self, chance: random.Random, true: Throughputs) -> dict[str, LogEstimate]:
        """Returns estimates of a run whose cells have these log throughputs."""
        shift, sign = chance.randrange(len(self.noise)), chance.choice((-1, 1))
        noise = itertools.cycle([*self.noise[shift:], *self.noise[:shift]])
        values: dict[str, list[float]] = {cell: [] for cell in true}
        wanted = [*true, *[self.baseline] * (math.isqrt(len(true)) - 1)]
        left = self.trials
        while True:
            chance.shuffle(wanted)
            for cell in wanted[:left]:
                values[cell].append(true[cell] + sign * next(noise))
            left -= len(wanted)
            cells = estimated(values)
            if left <= 0:
                return cells
            wanted = self.next_trials(cells, chance)

    def next_trials(self, cells: Mapping[str, LogEstimate], chance: random.Random) -> list[str]:
        """Mirrors `next_in_race`, without an end for equal cells."""
        racing = {name: cells[name] for name in contenders(cells)}
        few = [name for name, speed in racing.items() if speed.trials < RACE_ROUNDS]
        draws = range(min(MOST_DRAWS, 1 + len(racing) // 4))
        chosen = set(few) or {name for _ in draws for name in top_two(racing, chance)}
        return sorted(chosen | {self.baseline})


def estimated(values: Mapping[str, list[float]]) -> dict[str, LogEstimate]:
    """Mirrors `estimates_of`."""
    own = [
        Spread(statistics.variance(v) if len(v) > 1 else 0.0, len(v) - 1) for v in values.values()
    ]
    return {
        cell: LogEstimate(
            statistics.fmean(v), math.sqrt(spread.variance / len(v)), spread.degrees, len(v)
        )
        for (cell, v), spread in zip(values.items(), moderated(own), strict=True)
    }


class Found(NamedTuple):
    right: bool
    regret: float
    size: int
    """Cells in the set of the best."""
    held: bool
    """Whether the set holds the best."""
    half_width: float
    with_allowance: float
    beaten: bool
    """Whether a cell is called faster than the baseline."""


def outcome(design: Design, cells: Mapping[str, LogEstimate], true: Throughputs) -> Found:
    names = list(cells)
    best = max(true, key=true.__getitem__)
    picked = max(names, key=lambda name: cells[name].mean)
    bounds = against_best([cells[name] for name in names], CONFIDENCE)
    chosen = {name for name, bound in zip(names, bounds, strict=True) if bound.may_be_best}
    others = [name for name in names if name != design.baseline]
    widths, beaten = [], False
    for allowance in (0.0, FORKED_ALLOWANCE):
        wide = {name: replace(speed, allowance=allowance) for name, speed in cells.items()}
        found = gains(wide[design.baseline], [wide[name] for name in others])
        gain = dict(zip(others, found, strict=True)).get(picked)
        widths.append(gain.precision if gain and gain.precision else 0.0)
        beaten = beaten or any(one.verdict == "faster" for one in found)
    regret = true[best] - true[picked]
    return Found(picked == best, regret, len(chosen), best in chosen, *widths, beaten)


def situations(design: Design) -> dict[str, dict[str, float]]:
    """Returns log throughputs of the cells in each simulated situation."""
    ranked = sorted(design.levels, key=lambda name: -design.levels[name])
    clear = {cell: min(level, -0.039) for cell, level in design.levels.items()} | {ranked[0]: 0.0}
    close = {cell: min(level, -0.06) for cell, level in design.levels.items()}
    close |= {cell: -0.03 * place / 11 for place, cell in enumerate(ranked[:12])}
    return {
        "a clear winner": clear,
        "12 cells within 3 %": close,
        "all equal": dict.fromkeys(design.levels, 0.0),
    }


def main(folder: str, run_id: str = "") -> None:
    design, chance = Design(folder, run_id), random.Random(1)
    print(
        f"{design.trials} trials of {len(design.group)} cells; noise of a trial"
        f" {statistics.pstdev(design.noise):.1%}; {RUNS} runs each"
    )
    for name, true in situations(design).items():
        runs = [outcome(design, design.simulated(chance, true), true) for _ in range(RUNS)]
        print(
            f"{name}: best picked {sum(run.right for run in runs) / RUNS:.1%}, mean regret"
            f" {statistics.fmean(run.regret for run in runs):.2%}, median set"
            f" {statistics.median(run.size for run in runs):g} cells, holding the best in"
            f" {sum(run.held for run in runs) / RUNS:.1%}; gain known to"
            f" ±{statistics.median(run.half_width for run in runs):.1%}, with the allowance"
            f" ±{statistics.median(run.with_allowance for run in runs):.1%}; something called"
            f" faster than the baseline in {sum(run.beaten for run in runs) / RUNS:.1%}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
