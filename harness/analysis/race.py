"""Chooses the cells that get the next trials: a race for the fastest cell of each setting.

After its first trial, a cell drops out if noise cannot explain its distance from the fastest. The
other cells of the headline, the setting that leads the report, get a second trial. Then leaders and
challengers are drawn by their chance of being the fastest (top-two sampling: Russo, Operations
Research 68, 2020). Once the headline is decided, or its share of the time is spent, the other
settings race in the same way. A drawn setting, and always the headline, races in heats. A heat is
an interleaved batch of trials: a few cells with the baseline, which ties the heats to each other.
Its trials are interleaved if the machine allows.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from harness.analysis.ranking import against_best, confident_that_beaten
from harness.analysis.stats import (
    CONFIDENCE,
    EQUAL,
    LogEstimate,
    added_level_error,
    difference_error,
)

FAR_BEHIND = 4.5
"""Number of standard errors behind the fastest cell at which a cell drops out."""
MOST_TRIES = 50
RACE_ROUNDS = 2
"""Number of trials that each contender gets before leaders and challengers are drawn. The second is
in a heat, whose trials tell more than further separate ones (docs/studies/statistical-power.md)."""
GAIN_ERROR = 0.005
"""Standard error of the fastest cell's gain at which its race may end (see
docs/studies/statistical-power.md)."""
LEAST_FACTOR = 1.64
"""Lower bound on the critical values of one-sided bounds with 95% confidence."""
MOST_IN_HEAT = 4


@dataclass(frozen=True)
class Entrants:
    """Competing cells of one setting, by id."""

    speeds: Mapping[str, LogEstimate]
    """Estimates of the cells that may be recommended."""
    baseline: str
    smallest: Mapping[str, LogEstimate] = field(default_factory=dict)
    """Estimates of the cells with the lowest peak memory, which race separately."""


def next_heats(
    settings: Sequence[Entrants], chance: random.Random, headline_only: bool = False
) -> list[tuple[str, ...]]:
    """Returns ids of the cells of each heat; empty if nothing is open. Heats run alone or together.
    `settings`: the headline, then the others. `headline_only`: whether the others wait until the
    headline is decided."""
    if not settings:
        return []
    headline, *others = settings
    if heats := _first_heats(headline):
        return heats
    if headline_only and _is_open(headline):
        return [_drawn_heat(headline, chance)]
    if few := [name for setting in others for name in _with_few_trials(setting)]:
        return [(name,) for name in few]
    undecided = next(filter(_is_open, settings), None)
    return [_drawn_heat(undecided, chance)] if undecided else []


def _is_open(setting: Entrants) -> bool:
    if len(setting.speeds) < 2 or any(speed.degrees <= 0 for speed in setting.speeds.values()):
        return False
    best = max(setting.speeds.values(), key=lambda speed: speed.mean)
    usual = setting.speeds.get(setting.baseline, best)
    levels = added_level_error([(best, usual)])
    wide = usual is not best and math.hypot(best.error, usual.error, levels) > GAIN_ERROR
    return wide or _more_would_decide([*setting.speeds.values()])


def _more_would_decide(speeds: Sequence[LogEstimate]) -> bool:
    """Returns whether any number of further trials would decide more if the means stay as they are.
    The allowances remain, however many trials run."""
    if is_decided(speeds):
        return False
    certain = [replace(speed, error=0.0, level_error=0.0) for speed in speeds]
    return is_decided(certain) or _number_of_ties(certain) < _number_of_ties(speeds)


def _number_of_ties(speeds: Sequence[LogEstimate]) -> int:
    return sum(bound.may_be_best for bound in against_best(speeds))


def is_decided(speeds: Sequence[LogEstimate]) -> bool:
    """Returns whether the fastest cell is known, or all candidates are known to be tied."""
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
    """Returns ids of cells that are not far behind the fastest, or not known to be slower; all of
    them without a spread."""
    if not cells or any(speed.degrees <= 0 for speed in cells.values()):
        return set(cells)
    first = max(cells.values(), key=lambda speed: speed.mean)
    return {
        name
        for name, speed in cells.items()
        if first.mean - speed.mean <= FAR_BEHIND * difference_error(first, speed)
        or confident_that_beaten(speed, [o for o in cells.values() if o is not speed]) < CONFIDENCE
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


if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

FEWEST_DEGREES = 4
"""Degrees of freedom from which the spread between heats is used; with fewer, the spread of
separate trials is used."""

HEAT_ALLOWANCE = 0.0035
"""Standard deviation of what pauses between turns do to a cell's log throughput (docs/studies/
run-precision.md#what-heats-cannot-see)."""
APART_ALLOWANCE = 0.013
"""Standard deviation of what another launcher than the fork server does to a cell's log throughput
in comparison with the cells of the fork server (the same study)."""

Heat = Mapping[str, float]
"""Log throughput by cell id, up to a constant that all cells of the heat share."""


def heat_of(turns: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns a heat's log throughputs. `turns`: samples per second of each turn, by cell id. Cells
    are compared with the mean of a cycle, in which each cell has one turn, so that slow spells
    cancel. The median over cycles limits the weight of a single turn."""
    cycles = [[math.log(rate) for rate in rates] for rates in zip(*turns.values(), strict=False)]
    means = [statistics.fmean(rates) for rates in cycles]
    level = statistics.fmean(means)
    return {
        cell_id: level
        + statistics.median(rates[at] - mean for rates, mean in zip(cycles, means, strict=True))
        for at, cell_id in enumerate(turns)
    }


def joined(
    separate: Mapping[str, LogEstimate], heats: Sequence[Heat], apart: Collection[str] = ()
) -> tuple[dict[str, LogEstimate], list[float]]:
    """Returns the estimates from separate trials and heats, and the log level of each heat over
    that of the run. `separate`: estimates from separate trials. `apart`: cells that the fork server
    does not start."""
    spread = _spread(separate, heats)
    cells: dict[str, LogEstimate] = {}
    levels = [0.0] * len(heats)
    for part, numbers in enumerate(_connected(heats)):
        solved, their_levels = _solved(separate, [heats[number] for number in numbers], *spread)
        for name, cell in solved.items():
            allowance = math.hypot(HEAT_ALLOWANCE, APART_ALLOWANCE * (name in apart))
            cells[name] = replace(cell, part=part, allowance=allowance)
        for number, level in zip(numbers, their_levels, strict=True):
            levels[number] = level
    return cells, levels


def _connected(heats: Sequence[Heat]) -> list[list[int]]:
    parts: list[tuple[set[str], list[int]]] = []
    for number, heat in enumerate(heats):
        names, numbers = set(heat), [number]
        apart = []
        for part in parts:
            if part[0] & names:
                names |= part[0]
                numbers = part[1] + numbers
            else:
                apart.append(part)
        parts = [*apart, (names, numbers)]
    return [numbers for _, numbers in parts]


def _solved(
    separate: Mapping[str, LogEstimate],
    heats: Sequence[Heat],
    variance: float,
    degrees: float,
    from_heats: bool,
) -> tuple[dict[str, LogEstimate], list[float]]:
    """Returns the estimates of one part. Once the heats' spread is known, they alone decide
    differences: separate trials would add little, and a wrong weight would bias them."""
    import numpy as np

    design, values, names = layout(heats)
    count = len(names)
    precisions = np.array([_precision(separate[name], variance) for name in names])
    weights = precisions * (LITTLE if from_heats else 1.0)
    information = design.T @ design / variance
    information[range(count), range(count)] += weights
    weighted = design.T @ values / variance
    weighted[:count] += weights * [separate[name].mean for name in names]
    covariance = np.asarray(np.linalg.inv(information), np.float64)
    solution = covariance @ weighted
    trials = design[:, :count].sum(axis=0)
    variances = quasi_variances(covariance[:count, :count], int(trials.argmax()))
    level_error = float(precisions.sum()) ** -0.5
    cells = {
        name: replace(
            separate[name],
            mean=float(solution[at]),
            error=math.sqrt(float(variances[at])),
            degrees=degrees,
            trials=separate[name].trials + int(trials[at]),
            level_error=level_error,
        )
        for at, name in enumerate(names)
    }
    return cells, [float(level) for level in solution[count:]]


def layout(heats: Sequence[Heat]) -> tuple[Numbers, Numbers, list[str]]:
    """Returns the design matrix (trials by cells, then heats), the values, and the cells' names."""
    import numpy as np

    names = sorted({name for heat in heats for name in heat})
    observed = [
        (names.index(name), len(names) + number, value)
        for number, heat in enumerate(heats)
        for name, value in heat.items()
    ]
    design = np.zeros((len(observed), len(names) + len(heats)))
    for row, (cell, heat, _) in enumerate(observed):
        design[row, [cell, heat]] = 1.0
    return design, np.array([value for *_, value in observed]), names


def _spread(
    separate: Mapping[str, LogEstimate], heats: Sequence[Heat]
) -> tuple[float, float, bool]:
    """Returns the variance in heats, its degrees of freedom, and whether it was estimated from
    heats. If not, it is the variance of separate trials."""
    import numpy as np

    design, values, names = layout(heats)
    fitted, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    degrees = len(values) - int(rank)
    squares = float(((values - design @ fitted) ** 2).sum())
    informative = [separate[name] for name in names if separate[name].degrees > 0]
    if degrees >= FEWEST_DEGREES or not informative:
        return max(squares / max(degrees, 1), LEAST_VARIANCE), float(degrees), True
    variance = statistics.median(estimate.error**2 * estimate.trials for estimate in informative)
    degrees_of_all = min(estimate.degrees for estimate in informative)
    return max(variance, LEAST_VARIANCE), degrees_of_all, False


LEAST_VARIANCE = 1e-8
LITTLE = 1e-4
"""Share of their weight that separate trials keep once heats decide the differences; it only sets
the common level."""


def _precision(separate: LogEstimate, variance: float) -> float:
    if separate.degrees <= 0:
        return 1 / variance
    return 1 / max(separate.whole_error**2, LEAST_VARIANCE)


def quasi_variances(covariance: Numbers, first: int = 0) -> Numbers:
    """Returns variances whose sums are nearest to the variances of all differences, and no smaller
    for differences from the cell in row `first`."""
    import numpy as np

    count = len(covariance)
    diagonal: Numbers = np.diag(covariance)
    if count == 1:
        return diagonal
    differences = diagonal[:, None] + diagonal[None, :] - 2 * covariance
    if count == 2:
        return np.full(2, differences[0, 1] / 2)
    rows, others = np.triu_indices(count, 1)
    sums = np.zeros((len(rows), count))
    pairs = np.arange(len(rows))
    sums[pairs, rows] = sums[pairs, others] = 1.0
    # Relative deviations count, so that no small variance is neglected for a large one.
    scale = differences[rows, others]
    nearest = np.linalg.lstsq(sums / scale[:, None], np.ones(len(rows)), rcond=None)[0]
    nearest = np.maximum(np.asarray(nearest), float(scale.min()) / 8)
    variances: Numbers = np.maximum(nearest, differences[first] - nearest[first])
    return variances
