"""Joins separate trials with heats, in which a few cells train interleaved.

The logarithm of a trial's throughput is its cell's level, plus its heat's, plus noise. Both levels
are estimated by weighted least squares; separate trials tie cells to the level of the run. Errors
are quasi-variances (Firth and de Menezes, Biometrika 91, 2004): independent errors that give those
of all differences.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from harness.analysis.stats import LogEstimate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

FEWEST_DEGREES = 4
"""Degrees of freedom from which the spread between heats is used; with fewer, that of separate
trials."""

Heat = Mapping[str, float]
"""Log throughput by cell id, up to a constant."""


@dataclass(frozen=True)
class Joined:
    cells: Mapping[str, LogEstimate]
    levels: Sequence[float]
    """Log level of each heat over that of the run."""


def heat_of(turns: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns a heat's log throughputs. `turns`: samples per second of each turn, by cell id.

    Cells are compared with the mean of a cycle, in which each has one turn, so that slow spells
    cancel. The median over cycles limits the weight of a single turn.
    """
    cycles = [[math.log(rate) for rate in rates] for rates in zip(*turns.values(), strict=False)]
    means = [statistics.fmean(rates) for rates in cycles]
    level = statistics.fmean(means)
    return {
        cell_id: level
        + statistics.median(rates[at] - mean for rates, mean in zip(cycles, means, strict=True))
        for at, cell_id in enumerate(turns)
    }


def joined(separate: Mapping[str, LogEstimate], heats: Sequence[Heat]) -> Joined:
    """Returns the estimates from both. `separate`: estimates by separate trials."""
    spread = _spread(separate, heats)
    cells: dict[str, LogEstimate] = {}
    levels = [0.0] * len(heats)
    for part, numbers in enumerate(_connected(heats)):
        estimates = _solved(separate, [heats[number] for number in numbers], spread)
        cells |= {name: replace(cell, part=part) for name, cell in estimates.cells.items()}
        for number, level in zip(numbers, estimates.levels, strict=True):
            levels[number] = level
    return Joined(cells, levels)


class HeatSpread(NamedTuple):
    variance: float
    degrees: float
    from_heats: bool
    """Whether heats show it; else it is that of separate trials."""


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
    separate: Mapping[str, LogEstimate], heats: Sequence[Heat], spread: HeatSpread
) -> Joined:
    """Once the heats' spread is known, they alone decide differences: separate trials would add
    little, and a wrong weight would bias them."""
    import numpy as np

    design, values, names = _layout(heats)
    count = len(names)
    precisions = np.array([_precision(separate[name], spread.variance) for name in names])
    weights = precisions * (LITTLE if spread.from_heats else 1.0)
    information = design.T @ design / spread.variance
    information[range(count), range(count)] += weights
    weighted = design.T @ values / spread.variance
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
            degrees=spread.degrees,
            trials=separate[name].trials + int(trials[at]),
            level_error=level_error,
        )
        for at, name in enumerate(names)
    }
    return Joined(cells, [float(level) for level in solution[count:]])


def _layout(heats: Sequence[Heat]) -> tuple[Numbers, Numbers, list[str]]:
    """Returns the design (trials by cells, then heats), the values, and the cells' names."""
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


def _spread(separate: Mapping[str, LogEstimate], heats: Sequence[Heat]) -> HeatSpread:
    import numpy as np

    design, values, names = _layout(heats)
    fitted, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    degrees = len(values) - int(rank)
    squares = float(((values - design @ fitted) ** 2).sum())
    informative = [separate[name] for name in names if separate[name].degrees > 0]
    if degrees >= FEWEST_DEGREES or not informative:
        return HeatSpread(max(squares / max(degrees, 1), LEAST_VARIANCE), float(degrees), True)
    variance = statistics.median(estimate.error**2 * estimate.trials for estimate in informative)
    return HeatSpread(
        max(variance, LEAST_VARIANCE), min(estimate.degrees for estimate in informative), False
    )


LEAST_VARIANCE = 1e-8
LITTLE = 1e-4
"""Share of their weight with which separate trials set only the common level."""


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
