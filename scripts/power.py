"""How often a run of this design is right, by resampling the noise of a recorded one.

`.venv/bin/python -m scripts.power RESULTS [RUN]`: each simulated run has the recorded one's cells
and launches. Its noise is the recorded launches' deviations from their cells' means (after the
control), in the order in which they were launched and shifted by a random number of places: heavy
tails, slow spells and what neighbours share stay as they were. Prints how often equals are called
different, planted differences are found, intervals of 95 % hold, and the set of the best holds the
best.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections import defaultdict

from harness.analysis.answer import trustworthy
from harness.analysis.best import against_best
from harness.analysis.estimates import estimates_of
from harness.analysis.moderated import Spread, moderated
from harness.analysis.setting import setting
from harness.analysis.stats import CONFIDENCE, LogEstimate, ratio
from harness.analysis.summary import cell_results
from harness.record.store import Store
from harness.record.trial import TrialRecord

RUNS = 2000
PLANTED = (0.0, 0.02, 0.05, 0.10)


class Design:
    """The cells of a recorded run, the order of its launches, and their noise."""

    def __init__(self, folder: str, run_id: str) -> None:
        store = Store(folder)
        trials = store.load([run_id or store.run_ids()[-1]], steps=False).trials
        finished = [
            trial
            for trial in TrialRecord.from_frame(trials)
            if trial.samples_per_second is not None and not trial.oversubscribed
        ]
        finished.sort(key=lambda trial: trial.position)
        found = estimates_of(finished).by_trial
        logs: dict[str, list[float]] = defaultdict(list)
        for trial in finished:
            logs[trial.cell_id].append(math.log(found[trial.cell_id, trial.trial]))
        several = [trial for trial in finished if len(logs[trial.cell_id]) > 1]
        self.order = [trial.cell_id for trial in several]
        self.noise = [
            (math.log(found[trial.cell_id, trial.trial]) - statistics.fmean(logs[trial.cell_id]))
            * math.sqrt(len(logs[trial.cell_id]) / (len(logs[trial.cell_id]) - 1))
            for trial in several
        ]
        groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
        for cell in trustworthy(cell_results(trials)):
            if cell.cell_id in logs:
                groups[setting(cell)].append(cell.cell_id)
        self.group = max(groups.values(), key=len)
        """The cells of the largest setting."""

    def simulated(self, chance: random.Random, true: dict[str, float]) -> dict[str, LogEstimate]:
        """Estimates of a run whose cells have these logarithms of throughput (0 where none)."""
        shift, sign = chance.randrange(len(self.noise)), chance.choice((-1, 1))
        values: dict[str, list[float]] = defaultdict(list)
        for place, cell in enumerate(self.order):
            noise = sign * self.noise[(place + shift) % len(self.noise)]
            values[cell].append(true.get(cell, 0.0) + noise)
        own = [Spread(statistics.variance(v), len(v) - 1) for v in values.values()]
        return {
            cell: LogEstimate(
                statistics.fmean(v), math.sqrt(spread.variance / len(v)), spread.degrees, len(v)
            )
            for (cell, v), spread in zip(values.items(), moderated(own), strict=True)
        }


def main(folder: str, run_id: str = "") -> None:
    design, chance = Design(folder, run_id), random.Random(1)
    print(
        f"{len(design.order)} launches, {len(set(design.order))} cells, {len(design.group)} in the"
        f" largest setting; deviations of {statistics.pstdev(design.noise):.1%}; {RUNS} runs each"
    )
    for planted in PLANTED:
        told = held = 0
        for _ in range(RUNS):
            cell, other = chance.sample(design.group, 2)
            cells = design.simulated(chance, {cell: planted})
            told += ratio(cells[cell], cells[other]).verdict != "no difference seen"
            interval = ratio(cells[cell], cells[other], CONFIDENCE)
            assert interval.low is not None
            assert interval.high is not None
            held += interval.low <= math.exp(planted) <= interval.high
        print(
            f"planted {planted:.0%}: told apart {told / RUNS:.2%}, interval holds {held / RUNS:.2%}"
        )
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
    print(f"the set of the best holds the best {best / RUNS:.2%}, {size / RUNS:.1f} cells in it")


if __name__ == "__main__":
    main(*sys.argv[1:])
