"""Fits the constants of the cluster planner to measured runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import minimize
from scipy.special import ndtr

from harness.planner.cluster.calibration import (
    CalibratedRange,
    ClusterCalibration,
    ClusterSpread,
    MemoryConstants,
    MemoryLimit,
    TimeConstants,
)
from harness.planner.cluster.hardware import Cluster
from harness.planner.cluster.layout_memory import memory
from harness.planner.cluster.measured_runs import MeasuredRuns
from harness.planner.cluster.prediction import Predictions, predict
from harness.planner.cluster.question import ClusterQuestion
from harness.planner.cluster.step_time import step_time
from harness.planner.fitting import LEVEL, Bools, Floats, fit
from harness.spec.errors import UsageError

LAPSE = 0.03
"""Share of runs that fail, or succeed, for reasons unrelated to memory."""
SHARPEST = 0.04
"""Smallest standard deviation of a limit's logarithm: the median error of predicted memory."""
NEAR_LIMIT = 0.8
"""Share of the device's memory above which a run may be slow."""
SLOW = (float(np.log(5.0)), 0.5)
"""Mean and standard deviation of the logarithmic slowdown near the limit, if fewer than FEW_SLOW
runs were slow. Assumed."""
FEW_SLOW = 5
FEWEST = 20
"""Smallest number of rows for a calibration."""


@dataclass(frozen=True)
class RunGroup:
    """Rows of one model on one number of nodes, and their question."""

    rows: Bools
    question: ClusterQuestion


def groups(runs: MeasuredRuns, cluster: Cluster) -> Iterator[RunGroup]:
    for model in sorted(set(runs.models)):
        for nodes in np.unique(runs.nodes):
            rows = (runs.model_column == model) & (runs.nodes == nodes)
            if rows.any():
                first = int(np.flatnonzero(rows)[0])
                layout = runs.layouts[first]
                yield RunGroup(
                    rows,
                    ClusterQuestion(
                        runs.shapes[model],
                        cluster,
                        runs.sequence_length,
                        layout.data * layout.micro_batch * layout.accumulation,
                        layout.devices,
                    ),
                )


def predicted(
    runs: MeasuredRuns, cluster: Cluster, calibration: ClusterCalibration
) -> Iterator[tuple[RunGroup, Predictions]]:
    """Yields the predictions for each group of rows, with the memory of rank 0."""
    for group in groups(runs, cluster):
        yield group, predict(group.question, runs.layouts.take(group.rows), calibration, True)


def calibrate(runs: MeasuredRuns, cluster: Cluster, source: str) -> ClusterCalibration:
    """Returns the calibration fitted to these runs; raises UsageError if there are too few."""
    ran = runs.take(runs.ran)
    if len(ran) < FEWEST:
        raise UsageError(
            f"{len(ran)} measured runs are too few for a calibration; give at least {FEWEST}"
        )
    asked = [(group, ran.layouts.take(group.rows)) for group in groups(ran, cluster)]

    def seconds(constants: TimeConstants, _: Floats) -> Floats:
        result = np.zeros(len(ran))
        for group, layouts in asked:
            result[group.rows] = step_time(group.question, layouts, constants).total
        return result

    time, _ = fit(TimeConstants, seconds, ran.seconds)
    ahead = [step_time(group.question, layouts, time).ahead for group, layouts in asked]

    def reserved(constants: MemoryConstants, _: Floats) -> Floats:
        result = np.zeros(len(ran))
        for (group, layouts), share in zip(asked, ahead, strict=True):
            shape = group.question.shape
            result[group.rows] = memory(
                shape, ran.sequence_length, cluster, layouts, constants, share, True
            ).reserved
        return result

    # Contradicting rows ran different code, whose memory differs too.
    measured = np.isfinite(ran.memory_bytes) & ran.consistent()
    memory_constants, _ = fit(
        MemoryConstants,
        lambda constants, effects: reserved(constants, effects)[measured],
        ran.memory_bytes[measured],
    )
    sizes = [runs.shapes[name].parameters for name in set(runs.models)]
    within = CalibratedRange(
        (float(min(sizes)), float(max(sizes))),
        (int(ran.nodes.min()), int(ran.nodes.max())),
        int(ran.layouts.tensor.max()),
        int(ran.layouts.pipeline.max()),
    )
    first = ClusterCalibration(
        source,
        time,
        memory_constants,
        ClusterSpread(0.1, 0.0, 0.1, MemoryLimit(1.0, 0.1), MemoryLimit(1.0, 0.1), *SLOW),
        within,
        cluster.links,
    )
    return replace(first, spread=_spread(runs, cluster, first))


def _spread(runs: MeasuredRuns, cluster: Cluster, calibration: ClusterCalibration) -> ClusterSpread:
    count = len(runs)
    seconds, reserved, demand, least = np.zeros((4, count))
    possible = np.zeros(count, bool)
    for group, result in predicted(runs, cluster, calibration):
        everywhere = predict(group.question, result.layouts, calibration)
        seconds[group.rows] = result.seconds
        reserved[group.rows] = result.memory.reserved
        demand[group.rows] = everywhere.memory.demand
        least[group.rows] = everywhere.least
        possible[group.rows] = everywhere.fits > 0
    rows = runs.ran & runs.consistent()
    errors = np.abs(np.log(seconds[rows] / runs.seconds[rows]))
    doublings = np.log2(runs.nodes[rows])

    def loss(x: Floats) -> float:
        """Returns the pinball loss of the half-width at LEVEL (Koenker and Bassett, 1978)."""
        over = errors - (abs(x[0]) + abs(x[1]) * doublings)
        return float(np.mean(np.maximum(LEVEL * over, (LEVEL - 1) * over)))

    start = np.array([float(np.quantile(errors, LEVEL)), 0.01])
    base, slope = np.abs(minimize(loss, start, method="Nelder-Mead").x)
    of_memory = np.abs(np.log(reserved[rows] / runs.memory_bytes[rows]))
    consistent = runs.consistent()
    possible &= ~runs.refuted
    # Contradicting rows ran different code, so they tell nothing about full speed.
    known = possible & (consistent | ~runs.ran)
    room = _limit(demand[known] / cluster.memory_bytes, runs.ran[known])
    end = _limit(least[possible] / cluster.memory_bytes, runs.ran[possible])
    slow = runs.ran & ~consistent & (reserved >= NEAR_LIMIT * cluster.memory_bytes)
    times = np.log(runs.seconds[slow] / seconds[slow])
    mean, deviation = (times.mean(), times.std()) if len(times) >= FEW_SLOW else SLOW
    return ClusterSpread(
        time=float(base),
        time_per_doubling=float(slope),
        memory=float(np.nanquantile(of_memory, LEVEL)),
        room=room,
        end=end,
        slow=float(mean),
        slow_spread=float(deviation),
    )


def _limit(shares: Floats, passed: Bools) -> MemoryLimit:
    """Returns the maximum-likelihood limit; `passed`: which shares of memory stayed below it."""

    def unlikely(x: Floats) -> float:
        likely = ndtr((x[0] - np.log(shares)) / max(np.exp(x[1]), SHARPEST))
        likely = LAPSE + (1 - 2 * LAPSE) * likely
        return float(-np.sum(np.where(passed, np.log(likely), np.log(1 - likely))))

    found = minimize(unlikely, np.array([-0.1, np.log(0.1)]), method="Nelder-Mead")
    share, spread = np.exp(found.x)
    return MemoryLimit(float(share), float(max(spread, SHARPEST)))
