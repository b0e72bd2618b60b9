"""Chooses the cells that get the next trials: a race for the fastest of each setting.

After its first trial, a cell drops out if noise cannot explain its distance from the fastest.
The others get three trials each. Further trials go to the largest undecided setting, to leaders and
challengers drawn by their chance of being the fastest (top-two sampling: Russo, Operations Research
68, 2020). Cells with the lowest memory race separately.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness.analysis.ranking import against_best
from harness.analysis.stats import EQUAL, LogEstimate

FAR_BEHIND = 4.5
"""Standard errors behind the fastest at which a cell drops out."""
MOST_TRIES = 50
RACE_ROUNDS = 3
"""Trials of each contender before leaders and challengers are drawn."""
GAIN_ERROR = 0.005
"""Standard error of the fastest cell's gain over the baseline at which its race may end (see
docs/studies/statistical-power.md)."""
LEAST_FACTOR = 1.64
"""Lower bound on the critical values of one-sided bounds with 95 % confidence."""
MOST_DRAWS = 6
"""Draws per round, each of a leader and a challenger."""


@dataclass(frozen=True)
class Entrants:
    """Competing cells of one setting, by id."""

    speeds: Mapping[str, LogEstimate]
    """Cells that may be recommended."""
    baseline: str
    smallest: Mapping[str, LogEstimate] = field(default_factory=dict)
    """Cells with the lowest peak memory, which race separately."""


def next_round(settings: Sequence[Entrants], chance: random.Random) -> set[str]:
    """Returns the ids of cells that get one more trial; empty if nothing is open."""
    if few := set().union(*map(_with_few_trials, settings)):
        return few
    undecided = [setting for setting in settings if _is_open(setting)]
    if not undecided:
        return set()
    return _drawn_trials(max(undecided, key=lambda setting: len(setting.speeds)), chance)


def _is_open(setting: Entrants) -> bool:
    if len(setting.speeds) < 2 or any(speed.degrees <= 0 for speed in setting.speeds.values()):
        return False
    best = max(setting.speeds.values(), key=lambda speed: speed.mean)
    usual = setting.speeds.get(setting.baseline, best)
    wide = usual is not best and math.hypot(best.error, usual.error) > GAIN_ERROR
    return wide or _more_would_decide([*setting.speeds.values()])


def _more_would_decide(speeds: Sequence[LogEstimate]) -> bool:
    """Whether unlimited further trials with these means would decide more; allowances remain."""
    if is_decided(speeds):
        return False
    certain = [replace(speed, error=0.0) for speed in speeds]
    return is_decided(certain) or _number_of_ties(certain) < _number_of_ties(speeds)


def _number_of_ties(speeds: Sequence[LogEstimate]) -> int:
    return sum(bound.may_be_best for bound in against_best(speeds))


def is_decided(speeds: Sequence[LogEstimate]) -> bool:
    """Whether the fastest is known, or all candidates are known to be tied."""
    if len(speeds) < 2 or any(speed.degrees <= 0 for speed in speeds):
        return True
    first, second = sorted(speeds, key=lambda speed: -speed.mean)[:2]
    least = LEAST_FACTOR * math.hypot(first.whole_error, second.whole_error)
    if least > max(first.mean - second.mean, -math.log(1 - EQUAL)):
        return False  # Skips Hsu's bounds, which are much slower.
    bounded = zip(speeds, against_best(speeds), strict=True)
    ties = [speed for speed, bound in bounded if bound.may_be_best]
    return len(ties) < 2 or all(bound.low >= 1 - EQUAL for bound in against_best(ties))


def _with_few_trials(setting: Entrants) -> set[str]:
    fields = [cells for cells in (setting.speeds, setting.smallest) if len(setting.speeds) > 1]
    return {
        name for cells in fields for name in contenders(cells) if cells[name].trials < RACE_ROUNDS
    }


def _drawn_trials(setting: Entrants, chance: random.Random) -> set[str]:
    racing = {name: setting.speeds[name] for name in contenders(setting.speeds)}
    draws = range(min(MOST_DRAWS, 1 + len(racing) // 4))
    chosen = {name for _ in draws for name in top_two(racing, chance)}
    usual = setting.speeds.get(setting.baseline)
    if usual and usual.trials <= max(racing[name].trials for name in chosen):
        chosen.add(setting.baseline)
    return chosen


def contenders(cells: Mapping[str, LogEstimate]) -> set[str]:
    """Returns the ids of cells not far behind the fastest; without a spread, all."""
    if not any(speed.degrees > 0 for speed in cells.values()):
        return set(cells)
    first = max(cells.values(), key=lambda speed: speed.mean)
    return {
        name
        for name, speed in cells.items()
        if first.mean - speed.mean <= FAR_BEHIND * math.hypot(first.whole_error, speed.whole_error)
    }


def top_two(cells: Mapping[str, LogEstimate], chance: random.Random) -> tuple[str, ...]:
    """Returns a leader and, if another cell was drawn, a challenger."""
    leader = _drawn(cells, chance)
    for _ in range(MOST_TRIES):
        challenger = _drawn(cells, chance)
        if challenger != leader:
            return leader, challenger
    return (leader,)


def _drawn(cells: Mapping[str, LogEstimate], chance: random.Random) -> str:
    drawn = {name: _throughput(speed, chance) for name, speed in cells.items()}
    return max(drawn, key=drawn.__getitem__)


def _throughput(speed: LogEstimate, chance: random.Random) -> float:
    """Draws from Student's t: a normal value over the root of a scaled chi-square."""
    scale = chance.gammavariate(speed.degrees / 2, 2 / speed.degrees)
    return speed.mean + speed.error * chance.gauss(0.0, 1.0) / math.sqrt(max(scale, 1e-9))
