"""Chooses the cells that get the next trials: a race for the fastest of each setting.

After its first trial, a cell drops out if noise cannot explain its distance from the fastest. The
others get three trials each. Further trials go to the largest undecided setting, to leaders and
challengers drawn by their chance of being the fastest (top-two sampling: Russo, Operations Research
68, 2020).

The largest setting, and then one that is drawn, race in heats: a few cells with the baseline, which
ties the heats to each other, interleaved if the machine allows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness.analysis.ranking import against_best
from harness.analysis.stats import EQUAL, LogEstimate, added_level_error, difference_error

FAR_BEHIND = 4.5
"""Standard errors behind the fastest at which a cell drops out."""
MOST_TRIES = 50
RACE_ROUNDS = 3
"""Trials of each contender before leaders and challengers are drawn."""
GAIN_ERROR = 0.005
"""Standard error of the fastest cell's gain at which its race may end (see
docs/studies/statistical-power.md)."""
LEAST_FACTOR = 1.64
"""Lower bound on the critical values of one-sided bounds with 95 % confidence."""
MOST_IN_HEAT = 4


@dataclass(frozen=True)
class Entrants:
    """Competing cells of one setting, by id."""

    speeds: Mapping[str, LogEstimate]
    """Cells that may be recommended."""
    baseline: str
    smallest: Mapping[str, LogEstimate] = field(default_factory=dict)
    """Cells with the lowest peak memory, which race separately."""


def next_heats(settings: Sequence[Entrants], chance: random.Random) -> list[tuple[str, ...]]:
    """Returns ids of the cells of each heat, alone or together; empty if nothing is open."""
    first, *others = sorted(settings, key=lambda setting: -len(setting.speeds)) or [
        Entrants({}, "")
    ]
    if heats := _first_heats(first):
        return heats
    few: list[tuple[str, ...]] = [
        (name,) for setting in others for name in _with_few_trials(setting)
    ]
    if few:
        return few
    undecided = [setting for setting in (first, *others) if _is_open(setting)]
    return [_drawn_heat(undecided[0], chance)] if undecided else []


def _is_open(setting: Entrants) -> bool:
    if len(setting.speeds) < 2 or any(speed.degrees <= 0 for speed in setting.speeds.values()):
        return False
    best = max(setting.speeds.values(), key=lambda speed: speed.mean)
    usual = setting.speeds.get(setting.baseline, best)
    levels = added_level_error([(best, usual)])
    wide = usual is not best and math.hypot(best.error, usual.error, levels) > GAIN_ERROR
    return wide or _more_would_decide([*setting.speeds.values()])


def _more_would_decide(speeds: Sequence[LogEstimate]) -> bool:
    """Whether unlimited further trials with these means would decide more; allowances remain."""
    if is_decided(speeds):
        return False
    certain = [replace(speed, error=0.0, level_error=0.0) for speed in speeds]
    return is_decided(certain) or _number_of_ties(certain) < _number_of_ties(speeds)


def _number_of_ties(speeds: Sequence[LogEstimate]) -> int:
    return sum(bound.may_be_best for bound in against_best(speeds))


def is_decided(speeds: Sequence[LogEstimate]) -> bool:
    """Whether the fastest is known, or all candidates are known to be tied."""
    if len(speeds) < 2 or any(speed.degrees <= 0 for speed in speeds):
        return True
    first, second = sorted(speeds, key=lambda speed: -speed.mean)[:2]
    least = LEAST_FACTOR * difference_error(first, second)
    if least > max(first.mean - second.mean, -math.log(1 - EQUAL)):
        return False  # Skips Hsu's bounds, which are much slower.
    bounded = zip(speeds, against_best(speeds), strict=True)
    ties = [speed for speed, bound in bounded if bound.may_be_best]
    return len(ties) < 2 or all(bound.low >= 1 - EQUAL for bound in against_best(ties))


def _with_few_trials(setting: Entrants) -> list[str]:
    if len(setting.speeds) < 2:
        return []
    few = [
        name
        for cells in (setting.speeds, setting.smallest)
        for name in sorted(contenders(cells), key=lambda name: -cells[name].mean)
        if cells[name].trials < RACE_ROUNDS
    ]
    return list(dict.fromkeys(few))


def _first_heats(setting: Entrants) -> list[tuple[str, ...]]:
    if not (few := _with_few_trials(setting)):
        return []
    always, size = _always(setting), MOST_IN_HEAT - 1
    others = [name for name in few if name != always]
    return [(always, *others[at : at + size]) for at in range(0, max(1, len(others)), size)]


def _always(setting: Entrants) -> str:
    if setting.baseline in setting.speeds:
        return setting.baseline
    return max(setting.speeds, key=lambda name: setting.speeds[name].mean)


def _drawn_heat(setting: Entrants, chance: random.Random) -> tuple[str, ...]:
    racing = {name: setting.speeds[name] for name in contenders(setting.speeds)}
    chosen = dict.fromkeys([_always(setting)])
    for _ in range(MOST_TRIES):
        drawn = [name for name in top_two(racing, chance) if name not in chosen]
        chosen |= dict.fromkeys(drawn[: MOST_IN_HEAT - len(chosen)])
        if len(chosen) == min(MOST_IN_HEAT, len(racing | chosen)):
            break
    return tuple(chosen)


def contenders(cells: Mapping[str, LogEstimate]) -> set[str]:
    """Returns ids of cells not far behind the fastest, or not known to be slower; all without a
    spread."""
    if not cells or any(speed.degrees <= 0 for speed in cells.values()):
        return set(cells)
    first = max(cells.values(), key=lambda speed: speed.mean)
    bounds = against_best([*cells.values()])
    return {
        name
        for (name, speed), bound in zip(cells.items(), bounds, strict=True)
        if bound.may_be_best
        or first.mean - speed.mean <= FAR_BEHIND * difference_error(first, speed)
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
