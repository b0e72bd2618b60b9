"""How often a run of this design is right, by resampling a recorded run's noise.

`.venv/bin/python -m scripts.power RESULTS [RUN]` simulates runs with the recorded cells and
launches, then further rounds by the current rule, for a quarter as many launches. The noise is the
recorded launches' deviations from their cells' means, after the control. They keep their order but
are shifted by a random number of places, which preserves heavy tails, slow spells and what
neighbours share. Deviations are scaled by the usual one for their number of steps.

Prints how often equals are called different, planted differences are seen, 95 % intervals hold, and
the set of the best holds the best, with 95 % bounds. Differences are planted twice. First, one cell
differs from all others, which are equal, so further rounds go to all of them. Second, the two
fastest cells differ, and the answer depends on this pair alone.
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

from harness.analysis.answer import ELIMINATION_CONFIDENCE, EQUAL, trustworthy
from harness.analysis.estimates import Spread, estimates_of, moderated, prior, steps_of
from harness.analysis.precision import Precision
from harness.analysis.ranking import against_best
from harness.analysis.setting import Setting
from harness.analysis.stats import CONFIDENCE, LogEstimate, percentile, ratio
from harness.analysis.summary import cell_results
from harness.record.store import Store
from harness.record.trial import TrialRecord
from harness.run.allocation import FURTHER_SHARE

RUNS = int(os.environ.get("RUNS", "2000"))
PLANTED = (0.0, 0.02, 0.05, 0.10)
BEHIND = 0.15
"""Least lag of all other cells if the answer depends on two."""
SHARE_LEFT = float(os.environ.get("SHARE_LEFT", FURTHER_SHARE))
"""Further launches that fit in the time left, as a share of the planned ones."""


class Design:
    """A recorded run's cells, order of launches, and noise."""

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
        several = [trial for trial in finished if len(logs[trial.cell_id]) > 1]
        self.order = [trial.cell_id for trial in several]
        steps: dict[str, list[int]] = defaultdict(list)
        for trial in several:
            steps[trial.cell_id].append(steps_of(trial))
        self.steps = {cell: statistics.fmean(numbers) for cell, numbers in steps.items()}
        spreads = {
            cell: Spread(statistics.variance(logs[cell]), len(logs[cell]) - 1, self.steps[cell])
            for cell in self.steps
        }
        common = prior(list(spreads.values()))
        assert common is not None
        self.usual = {cell: math.sqrt(common.of(spread)) for cell, spread in spreads.items()}
        """Usual deviation of a launch, by number of steps."""
        self.noise = [
            (math.log(adjusted[trial.cell_id, trial.trial]) - statistics.fmean(logs[trial.cell_id]))
            * math.sqrt(len(logs[trial.cell_id]) / (len(logs[trial.cell_id]) - 1))
            / self.usual[trial.cell_id]
            for trial in several
        ]
        groups: dict[Setting, list[str]] = defaultdict(list)
        for cell in trustworthy(cell_results(trials)):
            if len(logs.get(cell.cell_id, [])) > 1:
                groups[Setting.of(cell.cell)].append(cell.cell_id)
        self.group = max(groups.values(), key=len)
        """Cells of the largest setting."""
        means = {cell: statistics.fmean(logs[cell]) for cell in self.group}
        self.baseline = max(self.group, key=lambda cell: len(logs[cell]))
        self.levels = {cell: mean - max(means.values()) for cell, mean in means.items()}
        """Logarithms of their recorded throughputs over the fastest one's."""

    def simulated(self, chance: random.Random, true: Mapping[str, float]) -> dict[str, LogEstimate]:
        """Returns estimates of a run whose cells have these log throughputs (0 by default)."""
        shift, sign = chance.randrange(len(self.noise)), chance.choice((-1, 1))
        noise = itertools.cycle([*self.noise[shift:], *self.noise[:shift]])
        values: dict[str, list[float]] = defaultdict(list)

        def launch(cell: str) -> None:
            deviation = sign * next(noise) * self.usual[cell]
            values[cell].append(true.get(cell, 0.0) + deviation)

        for cell in self.order:
            launch(cell)
        further = round(SHARE_LEFT * len(self.order))
        while True:
            estimates = estimated(values, self.steps)
            if self.known_well(estimates):
                wanted = open_cells({cell: estimates[cell] for cell in self.group})
            else:
                wanted = list(self.usual)
            if not wanted or further <= 0:
                return estimates
            for cell in wanted[:further]:  # the shortest
                launch(cell)
            further -= len(wanted)

    def known_well(self, cells: Mapping[str, LogEstimate]) -> bool:
        """Mirrors `not_known_well`, over all settings together."""
        ratios = [
            ratio(cells[cell], cells[self.baseline], CONFIDENCE)
            for cell in self.group
            if cell != self.baseline
        ]
        widths = [
            (known.high - known.low) / 2 / known.ratio
            for known in ratios
            if known.low is not None and known.high is not None
        ]
        median, nine_in_ten = statistics.median(widths), percentile(widths, 0.9)
        return Precision(len(widths), median, nine_in_ten).enough


def estimated(
    values: Mapping[str, list[float]], steps: Mapping[str, float]
) -> dict[str, LogEstimate]:
    """Mirrors `estimates_of`, for launches with these numbers of steps."""
    own = [Spread(statistics.variance(v), len(v) - 1, steps[cell]) for cell, v in values.items()]
    return {
        cell: LogEstimate(
            statistics.fmean(v), math.sqrt(spread.variance / len(v)), spread.degrees, len(v)
        )
        for (cell, v), spread in zip(values.items(), moderated(own), strict=True)
    }


def open_cells(cells: Mapping[str, LogEstimate]) -> list[str]:
    """Mirrors `undecided` in one setting."""
    bounds = dict(
        zip(cells, against_best(list(cells.values()), ELIMINATION_CONFIDENCE), strict=True)
    )
    best = [cell for cell, bound in bounds.items() if bound.may_be_best]
    if len(best) < 2:
        return []
    among = against_best([cells[cell] for cell in best], ELIMINATION_CONFIDENCE)
    return [] if all(bound.low >= 1 - EQUAL for bound in among) else best


def of_the_two_fastest(design: Design, chance: random.Random, planted: float) -> str:
    """Returns how often a difference between the two fastest cells is found."""
    seen = alone = launches = 0
    for _ in range(RUNS):
        winner, second = chance.sample(design.group, 2)
        true = {cell: min(level, -BEHIND) for cell, level in design.levels.items()}
        cells = design.simulated(chance, true | {winner: 0.0, second: -planted})
        seen += ratio(cells[winner], cells[second]).verdict != "no difference seen"
        bounds = against_best([cells[cell] for cell in design.group])
        chosen = {cell for cell, b in zip(design.group, bounds, strict=True) if b.may_be_best}
        alone += chosen == {winner}
        launches += cells[winner].trials
    return (
        f"the two fastest {planted:.0%} apart: called different {rate(seen, RUNS)}, the answer is"
        f" the faster one alone {rate(alone, RUNS)}, of {launches / RUNS:.0f} launches each"
    )


def rate(successes: int, of: int) -> str:
    """Formats a rate and its 95 % bounds (Clopper and Pearson): `95.0 % (93.1 to 96.5 %)`."""
    from scipy.stats import binomtest

    bounds = binomtest(successes, of).proportion_ci(CONFIDENCE)
    return f"{successes / of:.1%} ({bounds.low:.1%} to {bounds.high:.1%})"


def main(folder: str, run_id: str = "") -> None:
    design, chance = Design(folder, run_id), random.Random(1)
    print(
        f"{len(design.order)} launches, {len(set(design.order))} cells, {len(design.group)} in the"
        f" largest setting; deviations of"
        f" {statistics.median(design.usual.values()):.1%}; {RUNS} runs each"
    )
    for planted in PLANTED:
        seen = held = pairs = family = 0
        for _ in range(RUNS):
            winner, *others = chance.sample(design.group, len(design.group))
            cells = design.simulated(chance, {winner: planted})
            verdicts = [ratio(cells[winner], cells[other]) for other in others]
            intervals = [ratio(cells[winner], cells[other], CONFIDENCE) for other in others]
            seen += verdicts[0].verdict != "no difference seen"
            family += any(verdict.verdict != "no difference seen" for verdict in verdicts)
            pairs += len(intervals)
            held += sum(
                interval.low is not None
                and interval.high is not None
                and interval.low <= math.exp(planted) <= interval.high
                for interval in intervals
            )
        print(
            f"planted {planted:.0%}: a pair is called different {rate(seen, RUNS)}, some pair of"
            f" the run {family / RUNS:.1%}; intervals hold {held / pairs:.1%}"
        )
    for planted in PLANTED:
        print(of_the_two_fastest(design, chance, planted))
    best = size = 0
    for _ in range(RUNS):
        winner = chance.choice(design.group)
        true = {cell: -abs(chance.gauss(0, 0.05)) - 0.01 for cell in design.group} | {winner: 0.0}
        cells = design.simulated(chance, true)
        bounds = against_best([cells[cell] for cell in design.group])
        chosen = {
            cell for cell, bound in zip(design.group, bounds, strict=True) if bound.may_be_best
        }
        best += winner in chosen
        size += len(chosen)
    print(f"the set of the best holds the best {rate(best, RUNS)}, {size / RUNS:.1f} cells in it")


if __name__ == "__main__":
    main(*sys.argv[1:])
