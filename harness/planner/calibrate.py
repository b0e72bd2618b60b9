"""Fits the constants to measured runs: robustly, with priors, within physical bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares, minimize
from scipy.special import ndtr

from harness.planner.calibration import Calibration, Limit, Range, Spread
from harness.planner.cluster import Cluster
from harness.planner.constants import MemoryConstants, TimeConstants, bounds_of
from harness.planner.layouts import Bools, Floats
from harness.planner.memory import memory
from harness.planner.prediction import Predictions, predict
from harness.planner.question import Question
from harness.planner.runs import Runs
from harness.planner.steptime import step_time
from harness.spec.errors import UsageError

SCALE = 0.05
"""Logarithm of an ordinary error: rows that are much farther off hardly count (Cauchy loss)."""
PRIOR_WEIGHT = 0.7
"""A constant one standard deviation off its prior costs as much as a row off by this x SCALE."""
LEVEL = 0.84
"""Share of the calibration's own consistent rows that the 80 % intervals cover: more than 80 %, as
other models and clusters are predicted worse than those that were fitted."""
LAPSE = 0.03
"""Share of runs that fail, or run, for reasons that have nothing to do with memory."""
NEAR_LIMIT = 0.8
"""Share of the device's memory from which a run may be slow for want of memory."""
SQUEEZES = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1)
"""Shares of the activations' bytes that are tried as what is left when all reserve is freed."""
FEWEST = 20
"""Rows that a calibration needs."""


@dataclass(frozen=True)
class Group:
    """Rows of one model on one number of nodes: what one question asks for."""

    rows: Bools
    question: Question


def groups(runs: Runs, cluster: Cluster) -> Iterator[Group]:
    """The rows of each model on each number of nodes."""
    for model in sorted(set(runs.models)):
        for nodes in np.unique(runs.nodes):
            rows = (runs.model_column == model) & (runs.nodes == nodes)
            if rows.any():
                first = int(np.flatnonzero(rows)[0])
                layout = runs.layouts[first]
                yield Group(
                    rows,
                    Question(
                        runs.shapes[model],
                        cluster,
                        runs.sequence_length,
                        layout.data * layout.micro_batch * layout.accumulation,
                        layout.devices,
                    ),
                )


def predicted(
    runs: Runs, cluster: Cluster, calibration: Calibration
) -> Iterator[tuple[Group, Predictions]]:
    """Predictions of every group of rows, with rank 0's memory."""
    for group in groups(runs, cluster):
        yield group, predict(group.question, runs.layouts.take(group.rows), calibration, True)


def _fit(
    kind: type[TimeConstants] | type[MemoryConstants],
    predict_all: Callable[[TimeConstants | MemoryConstants], Floats],
    measured: Floats,
) -> TimeConstants | MemoryConstants:
    """The constants that bring predictions closest to measurements, on logarithms."""
    bounds = bounds_of(kind)
    prior = np.array([b.prior for b in bounds.values()])
    spread = np.array([b.spread for b in bounds.values()])
    low = (np.array([b.low for b in bounds.values()]) - prior) / spread
    high = (np.array([b.high for b in bounds.values()]) - prior) / spread

    def constants(x: Floats) -> TimeConstants | MemoryConstants:
        values = np.clip(prior + x * spread, prior + low * spread, prior + high * spread)
        return kind(**dict(zip(bounds, values.tolist(), strict=True)))

    def residuals(x: Floats) -> Floats:
        errors = np.log(predict_all(constants(x)) / measured)
        return np.concatenate([errors, PRIOR_WEIGHT * SCALE * x])

    found = least_squares(
        residuals,
        np.zeros(len(prior)),
        bounds=(low - 1e-6, high + 1e-6),
        loss="cauchy",
        f_scale=SCALE,
        max_nfev=60,
    )
    return constants(found.x)


def calibrate(runs: Runs, cluster: Cluster, source: str) -> Calibration:
    """The calibration that these runs give; raises UsageError where there are too few."""
    ran = runs.take(runs.ran)
    if len(ran) < FEWEST:
        raise UsageError(
            f"{len(ran)} measured runs are too few for a calibration; give at least {FEWEST}"
        )
    asked = [(group, ran.layouts.take(group.rows)) for group in groups(ran, cluster)]

    def seconds(constants: TimeConstants | MemoryConstants) -> Floats:
        assert isinstance(constants, TimeConstants)
        result = np.zeros(len(ran))
        for group, layouts in asked:
            result[group.rows] = step_time(group.question, layouts, constants).total
        return result

    time = _fit(TimeConstants, seconds, ran.seconds)
    assert isinstance(time, TimeConstants)
    ahead = [step_time(group.question, layouts, time).ahead for group, layouts in asked]

    def reserved(constants: TimeConstants | MemoryConstants) -> Floats:
        assert isinstance(constants, MemoryConstants)
        result = np.zeros(len(ran))
        for (group, layouts), share in zip(asked, ahead, strict=True):
            shape = group.question.shape
            result[group.rows] = memory(
                shape, ran.sequence_length, cluster, layouts, constants, share, True
            ).reserved
        return result

    measured = np.isfinite(ran.memory_bytes)
    memory_constants = _fit(
        MemoryConstants,
        lambda constants: reserved(constants)[measured],
        ran.memory_bytes[measured],
    )
    assert isinstance(memory_constants, MemoryConstants)
    sizes = [runs.shapes[name].parameters for name in set(runs.models)]
    within = Range(
        (float(min(sizes)), float(max(sizes))),
        int(ran.nodes.max()),
        int(ran.layouts.tensor.max()),
        int(ran.layouts.pipeline.max()),
    )
    first = Calibration(
        source,
        time,
        memory_constants,
        Spread(0.1, 0.0, 0.1, Limit(1.0, 0.1), Limit(1.0, 0.1), 1.0),
        within,
    )
    return replace(first, spread=_spread(runs, cluster, first))


def _spread(runs: Runs, cluster: Cluster, calibration: Calibration) -> Spread:
    """How measurements lie around the predictions of this calibration."""
    count = len(runs)
    seconds, reserved, demand, fixed, activations = np.zeros((5, count))
    possible = np.zeros(count, bool)
    for group, result in predicted(runs, cluster, calibration):
        everywhere = predict(group.question, result.layouts, calibration)
        seconds[group.rows] = result.seconds
        reserved[group.rows] = result.memory.reserved
        demand[group.rows] = everywhere.memory.demand
        fixed[group.rows] = everywhere.memory.states + everywhere.memory.working
        activations[group.rows] = everywhere.memory.activations
        possible[group.rows] = everywhere.fits > 0
    rows = runs.ran & runs.consistent()
    errors = np.abs(np.log(seconds[rows] / runs.seconds[rows]))
    doublings = np.log2(runs.nodes[rows])

    def loss(x: Floats) -> float:
        """Pinball loss of the half-width at LEVEL (Koenker and Bassett, 1978)."""
        over = errors - (abs(x[0]) + abs(x[1]) * doublings)
        return float(np.mean(np.maximum(LEVEL * over, (LEVEL - 1) * over)))

    start = np.array([float(np.quantile(errors, LEVEL)), 0.01])
    base, slope = np.abs(minimize(loss, start, method="Nelder-Mead").x)
    of_memory = np.abs(np.log(reserved[rows] / runs.memory_bytes[rows]))
    consistent = runs.consistent()
    # Slow for another reason than memory: says nothing of it.
    other = runs.ran & ~consistent & (reserved < NEAR_LIMIT * cluster.memory_bytes)
    possible &= ~runs.refuted
    known = possible & ~other
    room = _limit(demand[known] / cluster.memory_bytes, (runs.ran & consistent)[known])
    ends = {
        squeeze: _limit(
            (fixed + squeeze * activations)[possible] / cluster.memory_bytes, runs.ran[possible]
        )
        for squeeze in SQUEEZES
    }
    squeeze = max(SQUEEZES, key=lambda share: ends[share][1])
    return Spread(
        time=float(base),
        time_per_doubling=float(slope),
        memory=float(np.nanquantile(of_memory, LEVEL)),
        room=room[0],
        end=ends[squeeze][0],
        squeeze=squeeze,
    )


def _limit(shares: Floats, passed: Bools) -> tuple[Limit, float]:
    """The limit under which these shares of memory passed or failed most likely, and the logarithm
    of that likelihood."""

    def unlikely(x: Floats) -> float:
        likely = ndtr((x[0] - np.log(shares)) / np.exp(x[1]))
        likely = LAPSE + (1 - 2 * LAPSE) * likely
        return float(-np.sum(np.where(passed, np.log(likely), np.log(1 - likely))))

    found = minimize(unlikely, np.array([-0.1, np.log(0.1)]), method="Nelder-Mead")
    share, spread = np.exp(found.x)
    return Limit(float(share), float(max(spread, 0.01))), -float(found.fun)
