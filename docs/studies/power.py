"""Estimates how often a run of this design is right, by resampling a recorded run's noise.

`.venv/bin/python -m docs.studies.power RESULTS [RUN]` simulates the recorded run's largest setting:
`ROUNDS` planned rounds, then heats of likely winners, in the recorded run's time. The other
settings get a trial of each cell. The noise of separate trials is the recorded trials' deviations
from their cells' means, after correction by the control. They keep their order but are shifted by a
random number of places, which preserves heavy tails, slow spells and what neighbours share. Trials
of a heat deviate as in the record's heats, or by HEAT_NOISE if given.

Prints a line each for the recorded levels, a clear winner, many close cells, and equal cells. With
`coverage` for RUN, it instead simulates `RUNS` inventories of 53 equal cells and prints how often
the set of the best holds the first. With `slower`, it prints how often scripts/slower.py calls one
of two equal cells slower or faster after five rounds of trials with the recorded noise.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from harness.analysis.answer import trustworthy
from harness.analysis.estimates import ALLOWANCE, estimates_of, log_estimates, steps_of
from harness.analysis.race import Entrants, heat_of, joined, layout, next_heats
from harness.analysis.ranking import against_best, confident_that_beaten, gains
from harness.analysis.setting import Setting
from harness.analysis.stats import CONFIDENCE, SMALLEST_EFFECT, LogEstimate, students_t
from harness.analysis.summary import cell_results
from harness.record.plan import FURTHER_TIMES, kept_plan
from harness.record.store import Store
from harness.record.trial import TrialRecord
from harness.run.runner import HEAT_SECONDS, RESERVED
from harness.worker.spec import STEPS_IN_A_TURN
from scripts.slower import FALSE_ALARM_RATE

RUNS = int(os.environ.get("RUNS", "500"))
ROUNDS = int(os.environ.get("ROUNDS", "1"))
NOISE = float(os.environ.get("NOISE", "0"))
"""Standard deviation to which the noise is scaled. 0 keeps what was recorded."""
HEAT_NOISE = float(os.environ.get("HEAT_NOISE", "0"))
"""Standard deviation to which the noise of heats is scaled. 0 keeps what was recorded."""
START_SECONDS = 30.0
REFERENCE_SECONDS = 90.0
EQUAL_CELLS = 53
Throughputs = Mapping[str, float]


class Design:
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
        plan = kept_plan(store, trials["run_id"].iloc[0])
        steps = {trial.cell_id: steps_of(trial) for trial in reversed(finished)}

        def times(trial: TrialRecord) -> float:
            """Returns the trial's length over that of the cell's first."""
            longer = steps_of(trial) > math.sqrt(FURTHER_TIMES) * steps.get(trial.cell_id, math.inf)
            return FURTHER_TIMES if longer else 1.0

        noise = [
            (math.log(adjusted[trial.cell_id, trial.trial]) - statistics.fmean(own))
            * math.sqrt(len(own) / (len(own) - 1) * times(trial))
            for trial in finished
            if len(own := logs[trial.cell_id]) > 1
        ]
        self.spread = statistics.pstdev(noise)
        self.noise = [x * (NOISE / self.spread if NOISE else 1.0) for x in noise]
        residuals = noise_of_heats([heat_of(heat) for heat in heats_of(finished)])
        scale = HEAT_NOISE / statistics.pstdev(residuals) if HEAT_NOISE else 1.0
        self.heat_noise = [scale * residual for residual in residuals]
        groups: dict[Setting, list[str]] = defaultdict(list)
        for cell in trustworthy(cell_results(trials)):
            if cell.parity.same_training and cell.cell_id in logs:
                groups[Setting.of(cell.cell)].append(cell.cell_id)
        self.group = max(groups.values(), key=len)
        walls: dict[str, list[float]] = defaultdict(list)
        for trial in TrialRecord.from_frame(trials):
            further = (times(trial) - 1) * plan.timed_seconds
            walls[trial.cell_id].append((trial.wall_seconds or 0.0) - further)
        took = {cell: statistics.median(seconds) for cell, seconds in walls.items()}
        self.took = {cell: took.pop(cell) for cell in self.group}
        self.longer = HEAT_SECONDS * (STEPS_IN_A_TURN + 1) / STEPS_IN_A_TURN - plan.timed_seconds
        others = RESERVED * sum(took.values())
        self.seconds = (plan.time_budget_seconds or math.inf) - REFERENCE_SECONDS - others
        self.baseline = max(self.group, key=lambda cell: len(logs[cell]))
        means = {cell: statistics.fmean(logs[cell]) for cell in self.group}
        self.levels = {cell: mean - max(means.values()) for cell, mean in means.items()}

    def simulated(self, chance: random.Random, true: Throughputs) -> dict[str, LogEstimate]:
        shift, sign = chance.randrange(len(self.noise)), chance.choice((-1, 1))
        noise = itertools.cycle([*self.noise[shift:], *self.noise[:shift]])
        planned = [*true, *[self.baseline] * (math.isqrt(len(true) - 1) - 1)] * ROUNDS
        chance.shuffle(planned)
        values: dict[str, list[float]] = {cell: [] for cell in true}
        for cell in planned:
            values[cell].append(true[cell] + sign * next(noise))
        seconds = self.seconds - START_SECONDS - sum(map(self.took.__getitem__, planned))
        heats: list[dict[str, float]] = []
        separate = estimated(values)
        cells = separate
        for _ in range(RUN_LENGTH):
            begun = len(heats)
            for heat in next_heats([Entrants(cells, self.baseline)], chance):
                seconds -= sum(self.took[cell] + self.longer for cell in heat)
                if seconds >= 0:
                    heats.append({c: true[c] + chance.choice(self.heat_noise) for c in heat})
            if begun == len(heats):
                break
            cells = {**separate, **joined(separate, heats)[0]}
        return cells


def heats_of(trials: Sequence[TrialRecord]) -> list[dict[str, Sequence[float]]]:
    heats: dict[int, dict[str, Sequence[float]]] = defaultdict(dict)
    for trial in trials:
        if trial.turn_samples_per_second:
            heats[trial.trial][trial.cell_id] = trial.turn_samples_per_second
    return [heat for heat in heats.values() if len(heat) > 1]


def noise_of_heats(heats: Sequence[Mapping[str, float]]) -> list[float]:
    """Returns the residuals of heats, scaled up by the fit's degrees of freedom."""
    design, values, _ = layout(heats)
    fitted, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    scale = math.sqrt(len(values) / (len(values) - int(rank)))
    return [float(residual) for residual in scale * (values - design @ fitted)]


RUN_LENGTH = 10_000
"""Rounds after which a run ends in any case."""


def estimated(values: Mapping[str, Sequence[float]]) -> dict[str, LogEstimate]:
    lengths = {name: [1] * len(own) for name, own in values.items()}
    cells = log_estimates(values, lengths, lengths)
    return {name: replace(cell, allowance=ALLOWANCE) for name, cell in cells.items()}


class Found(NamedTuple):
    right: bool
    regret: float
    size: int
    held: bool
    half_width: float
    with_allowance: float
    beaten: bool


def outcome(design: Design, cells: Mapping[str, LogEstimate], true: Throughputs) -> Found:
    names = list(cells)
    best = max(true, key=true.__getitem__)
    picked = max(names, key=lambda name: cells[name].mean)
    bounds = against_best([cells[name] for name in names])
    chosen = {name for name, bound in zip(names, bounds, strict=True) if bound.may_be_best}
    others = [name for name in names if name != design.baseline]
    widths, beaten = [], False
    for factor in (0, 1):
        wide = {n: replace(speed, allowance=factor * speed.allowance) for n, speed in cells.items()}
        found = gains(wide[design.baseline], [wide[name] for name in others])
        near = [picked, *(chosen - {picked, design.baseline})]
        gain = (
            gains(wide[design.baseline], [wide[n] for n in near])[0] if picked in others else None
        )
        widths.append(gain.precision if gain and gain.precision else 0.0)
        beaten = beaten or any(one.verdict == "faster" for one in found)
    regret = true[best] - true[picked]
    return Found(picked == best, regret, len(chosen), best in chosen, *widths, beaten)


def situations(design: Design) -> dict[str, dict[str, float]]:
    ranked = sorted(design.levels, key=lambda name: -design.levels[name])
    clear = {cell: min(level, -0.039) for cell, level in design.levels.items()} | {ranked[0]: 0.0}
    close = {cell: min(level, -0.06) for cell, level in design.levels.items()}
    close |= {cell: -0.03 * place / 11 for place, cell in enumerate(ranked[:12])}
    return {
        "as recorded": design.levels,
        "a clear winner": clear,
        "12 cells within 3%": close,
        "all equal": dict.fromkeys(design.levels, 0.0),
    }


def coverage(chance: random.Random) -> float:
    names = [str(number) for number in range(EQUAL_CELLS)]
    held = 0
    for _ in range(RUNS):
        values = {name: [chance.gauss(0.0, 0.03)] for name in names}
        values[names[0]] += [chance.gauss(0.0, 0.03) for _ in range(6)]
        cells = estimated(values)
        first, *others = (cells[name] for name in reversed(names))
        held += confident_that_beaten(first, others) < CONFIDENCE
    return held / RUNS


def false_alarms(noise: Sequence[float], rounds: int = 5, cells: int = 2) -> float:
    chance, shape = np.random.default_rng(1), (400_000, rounds)
    logs = chance.choice(noise, shape) - chance.choice(noise, shape)
    confidence = 1 - FALSE_ALARM_RATE / cells
    half = students_t(confidence, rounds - 1) * logs.std(axis=1, ddof=1) / math.sqrt(rounds)
    means = abs(logs.mean(axis=1))
    return 1 - (1 - float(((means > half) & (means >= SMALLEST_EFFECT)).mean())) ** cells


HEAD = ("situation", "best", "regret", "set", "set holds best", "gain", "+ allowance", "beaten")


def main(folder: str, run_id: str = "") -> None:
    if run_id == "coverage":
        print(f"{RUNS} runs: the set holds the best in {coverage(random.Random(1)):.2%}")
        return
    if run_id == "slower":
        print(f"{false_alarms(Design(folder, '').noise):.3%} of runs have a false alarm")
        return
    design, chance = Design(folder, run_id), random.Random(1)
    print(
        f"{design.seconds:.0f} s for {len(design.group)} cells; noise of a trial"
        f" {statistics.pstdev(design.noise):.1%}; {RUNS} runs each, {ROUNDS} planned rounds"
    )
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|")
    for name, true in situations(design).items():
        runs = [outcome(design, design.simulated(chance, true), true) for _ in range(RUNS)]
        figures = (
            name,
            f"{sum(run.right for run in runs) / RUNS:.1%}",
            f"{statistics.fmean(run.regret for run in runs):.2%}",
            f"{statistics.median(run.size for run in runs):g}",
            f"{sum(run.held for run in runs) / RUNS:.1%}",
            f"±{statistics.median(run.half_width for run in runs):.1%}",
            f"±{statistics.median(run.with_allowance for run in runs):.1%}",
            f"{sum(run.beaten for run in runs) / RUNS:.1%}",
        )
        print("| " + " | ".join(figures) + " |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
