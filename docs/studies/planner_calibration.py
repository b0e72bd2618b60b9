"""Fits the planner's constants to measured runs of a cluster (docs/studies/planner-accuracy.md).

`planner_scores.py --fit FILE` writes the constants for `bench plan --calibration FILE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pandas as pd
import yaml
from pydantic import TypeAdapter
from scipy.optimize import least_squares, minimize
from scipy.special import ndtr

from harness.cell.durable import write_atomically
from harness.cell.errors import UsageError
from harness.planner.cluster.calibration import (
    LEVEL,
    Bools,
    CalibratedRange,
    ClusterCalibration,
    ClusterSpread,
    Floats,
    Ints,
    MemoryConstants,
    MemoryLimit,
    TimeConstants,
    Widening,
    priors_of,
)
from harness.planner.cluster.hardware import Cluster
from harness.planner.cluster.hf_config import parse_shape
from harness.planner.cluster.layout_memory import memory
from harness.planner.cluster.model_shape import ModelShape
from harness.planner.cluster.prediction import Predictions, predict
from harness.planner.cluster.question import ClusterQuestion, PlannedLayouts
from harness.planner.cluster.step_time import step_time

COLUMNS = (
    "model", "Nodes", "MBS", "GradAcc", "GBS", "DP", "PP", "TP", "ZeRO", "tok_s", "gpu_mem_gb",
)  # fmt: skip
MODELS = {name: f"playbook-{name.lower()}" for name in ("1B", "3B", "8B", "80B")}
"""Model names in the Ultra-Scale Playbook's table."""
MEMORY_UNIT = 2.0**30
"""Bytes per unit of `gpu_mem_gb`: nanotron divides by 1024**3 (`create_table_log`)."""
LAPSE = 0.03
"""Share of runs that fail or succeed regardless of memory."""
SHARPEST = 0.04
"""Smallest standard deviation of a limit's log: the median error of predicted memory."""
NEAR_LIMIT = 0.8
"""Share of device memory above which a run may be slow."""
SLOW = (float(np.log(5.0)), 0.5)
"""Assumed mean and standard deviation of the log slowdown near the limit."""
FEW_SLOW = 5
FEWEST = 20
SCALE = 0.05
"""Typical log error; much larger ones hardly count (Cauchy loss)."""
PRIOR_WEIGHT = 0.7
"""Error of a row, in units of SCALE, as costly as one standard deviation from a prior."""
MOST_EVALUATIONS = 60
ENOUGH = 1e-4
"""Relative change of the loss that ends a fit."""
ONE_MODEL, ONE_NODE_COUNT = Widening(0.01, 0.009), Widening(0.08, 0.019)
"""Widening, as in calibration.yaml, if no model, or no number of nodes, can be left out."""

Errors = Callable[[Bools, Bools], "tuple[Floats, Floats] | None"]
"""Fits to the first rows; returns absolute log errors of time and memory in the second, or None if
too few."""
Constants = TypeVar("Constants", TimeConstants, MemoryConstants)


@dataclass(frozen=True)
class MeasuredRuns:
    """Measured runs (shape [rows])."""

    models: tuple[str, ...]
    shapes: Mapping[str, ModelShape]
    nodes: Ints
    layouts: PlannedLayouts
    sequence_length: int
    seconds: Floats
    """Step time; NaN if the run failed."""
    memory_bytes: Floats
    """Peak memory of rank 0; NaN if the run failed."""

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def ran(self) -> Bools:
        return np.isfinite(self.seconds)

    @property
    def sizes(self) -> Floats:
        """Parameters of each row's model."""
        return np.array([self.shapes[name].parameters for name in self.models], float)

    @property
    def model_column(self) -> np.ndarray[tuple[int], np.dtype[np.str_]]:
        return np.array(self.models)

    @property
    def refuted(self) -> Bools:
        """Failed rows whose model and layout succeeded in another row."""
        keys = [(name, self.layouts[row]) for row, name in enumerate(self.models)]
        could = {key for key, ran in zip(keys, self.ran, strict=True) if ran}
        return np.array([key in could for key in keys]) & ~self.ran

    def take(self, rows: Bools) -> MeasuredRuns:
        return MeasuredRuns(
            tuple(self.model_column[rows].tolist()),
            self.shapes,
            self.nodes[rows],
            self.layouts.take(rows),
            self.sequence_length,
            self.seconds[rows],
            self.memory_bytes[rows],
        )

    def consistent(self) -> Bools:
        """Returns which rows are consistent, including failed ones.

        Others took over twice as long as a row with at least as much work, so they ran different
        code.
        """
        size = self.sizes
        seconds, a = np.where(self.ran, self.seconds, np.inf), self.layouts
        result = np.ones(len(self), bool)
        for row in np.flatnonzero(self.ran):
            as_much = (
                (size >= size[row])
                & (self.nodes <= self.nodes[row])
                & (a.micro_batch <= a.micro_batch[row])
                & (a.accumulation >= a.accumulation[row])
                & (a.tensor >= a.tensor[row])
                & (a.pipeline >= a.pipeline[row])
            )
            result[row] = not np.any(as_much & (2 * seconds < seconds[row]))
        return result


def read_runs(
    file: Path, models: Mapping[str, str] = MODELS, sequence_length: int = 4096
) -> MeasuredRuns:
    """Reads a CSV file with the Ultra-Scale Playbook's columns.

    Skips rows with inconsistent batches. Raises UsageError if unreadable, or for a missing column
    or unknown model.
    """
    try:
        table = pd.read_csv(file)
    except OSError as error:
        raise UsageError(f"cannot read runs from {str(file)!r}: {error.strerror}") from None
    except (ValueError, pd.errors.ParserError):
        raise UsageError(f"{str(file)!r} is not a table of comma-separated values") from None
    if missing := [name for name in COLUMNS if name not in table]:
        raise UsageError(f"{str(file)!r} lacks the column {missing[0]!r}; needed: {COLUMNS}")
    table = table[table.DP * table.MBS * table.GradAcc == table.GBS]
    names = tuple(table.model.astype(str))
    if unknown := sorted(set(names) - models.keys()):
        raise UsageError(
            f"{str(file)!r}: unknown model {unknown[0]!r}; use one of {', '.join(models)}"
        )

    def ints(name: str) -> Ints:
        return table[name].to_numpy(np.int64)

    one = np.ones(len(table), np.int64)
    layouts = PlannedLayouts(
        data=ints("DP"),
        pipeline=ints("PP"),
        tensor=ints("TP"),
        context=one,
        expert=one,
        zero=ints("ZeRO"),
        micro_batch=ints("MBS"),
        accumulation=ints("GradAcc"),
        recompute=0 * one,
        offload=0 * one,
        chunks=one,
        whole_gradients=0 * one,
    )
    tokens = table.GBS.to_numpy(float) * sequence_length
    return MeasuredRuns(
        models=names,
        shapes={name: parse_shape(models[name]) for name in set(names)},
        nodes=ints("Nodes"),
        layouts=layouts,
        sequence_length=sequence_length,
        seconds=tokens / table.tok_s.to_numpy(float),
        memory_bytes=table.gpu_mem_gb.to_numpy(float) * MEMORY_UNIT,
    )


def save(calibration: ClusterCalibration, file: Path) -> None:
    """Writes a file atomically; raises OSError, which leaves an existing file unchanged."""
    values = TypeAdapter(ClusterCalibration).dump_python(calibration, mode="json")
    write_atomically(file, yaml.safe_dump(values, sort_keys=False))


@dataclass(frozen=True)
class RunGroup:
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
    """Yields each group's predictions; memory is rank 0's."""
    for group in groups(runs, cluster):
        yield group, predict(group.question, runs.layouts.take(group.rows), calibration, True)


def calibrate(runs: MeasuredRuns, cluster: Cluster, source: str) -> ClusterCalibration:
    """Fits a calibration; raises UsageError with too few runs."""
    ran = runs.take(runs.ran)
    if len(ran) < FEWEST:
        raise UsageError(
            f"{len(ran)} measured runs are too few for a calibration; give at least {FEWEST}"
        )
    first = _fitted(ran, cluster, source)
    fits = {np.ones(len(ran), bool).tobytes(): first}

    def errors(seen: Bools, left: Bools) -> tuple[Floats, Floats] | None:
        if seen.sum() < FEWEST:
            return None
        key = seen.tobytes()
        if key not in fits:
            fits[key] = _fitted(ran.take(seen), cluster, "left out", first)
        return _errors(ran, cluster, fits[key], left)

    widths = transfer_widths(ran.sizes, ran.nodes, errors)
    return replace(first, spread=_spread(runs, cluster, first, widths))


def _fitted(
    ran: MeasuredRuns, cluster: Cluster, source: str, start: ClusterCalibration | None = None
) -> ClusterCalibration:
    """Returns fitted constants, with a placeholder for the spread."""
    asked = [(group, ran.layouts.take(group.rows)) for group in groups(ran, cluster)]

    def seconds(constants: TimeConstants) -> Floats:
        result = np.zeros(len(ran))
        for group, layouts in asked:
            result[group.rows] = step_time(group.question, layouts, constants).total
        return result

    time = fit(TimeConstants, seconds, ran.seconds, start.time if start else None)
    ahead = [step_time(group.question, layouts, time).ahead for group, layouts in asked]

    def reserved(constants: MemoryConstants) -> Floats:
        result = np.zeros(len(ran))
        for (group, layouts), share in zip(asked, ahead, strict=True):
            shape = group.question.shape
            result[group.rows] = memory(
                shape, ran.sequence_length, cluster, layouts, constants, share, True
            ).reserved
        return result

    # Inconsistent rows ran different code, whose memory differs.
    measured = np.isfinite(ran.memory_bytes) & ran.consistent()
    memory_constants = fit(
        MemoryConstants,
        lambda constants: reserved(constants)[measured],
        ran.memory_bytes[measured],
        start.memory if start else None,
    )
    within = CalibratedRange(
        (float(ran.sizes.min()), float(ran.sizes.max())),
        (int(ran.nodes.min()), int(ran.nodes.max())),
        int(ran.layouts.tensor.max()),
        int(ran.layouts.pipeline.max()),
    )
    limit, none = MemoryLimit(1.0, 0.1), Widening(0.0, 0.0)
    spread = ClusterSpread(0.1, 0.0, 0.1, limit, limit, *SLOW, none, none)
    return ClusterCalibration(source, time, memory_constants, spread, within, cluster.links)


def _errors(
    ran: MeasuredRuns, cluster: Cluster, fitted: ClusterCalibration, left: Bools
) -> tuple[Floats, Floats]:
    """Returns absolute log errors of time (NaN in inconsistent rows) and memory in rows `left`."""
    rows = ran.take(left)
    time, of_memory = np.full((2, len(rows)), np.nan)
    for group, result in predicted(rows, cluster, fitted):
        time[group.rows] = np.abs(np.log(result.seconds / rows.seconds[group.rows]))
        reserved = result.memory.reserved
        of_memory[group.rows] = np.abs(np.log(reserved / rows.memory_bytes[group.rows]))
    return np.where(ran.consistent()[left], time, np.nan), of_memory


def _spread(
    runs: MeasuredRuns, cluster: Cluster, calibration: ClusterCalibration, widths: TransferWidths
) -> ClusterSpread:
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
    consistent = runs.consistent()
    possible &= ~runs.refuted
    # Inconsistent rows say nothing about full speed.
    known = possible & (consistent | ~runs.ran)
    room = _limit(demand[known] / cluster.memory_bytes, runs.ran[known])
    end = _limit(least[possible] / cluster.memory_bytes, runs.ran[possible])
    slow = runs.ran & ~consistent & (reserved >= NEAR_LIMIT * cluster.memory_bytes)
    times = np.log(runs.seconds[slow] / seconds[slow])
    mean, deviation = (times.mean(), times.std()) if len(times) >= FEW_SLOW else SLOW
    return ClusterSpread(
        time=widths.time,
        time_per_doubling=widths.time_per_doubling,
        memory=widths.memory,
        room=room,
        end=end,
        slow=float(mean),
        slow_spread=float(deviation),
        nodes=widths.nodes,
        shape=widths.shape,
    )


def _limit(shares: Floats, passed: Bools) -> MemoryLimit:
    """Fits a limit by maximum likelihood; `passed` marks shares below it."""

    def unlikely(x: Floats) -> float:
        likely = ndtr((x[0] - np.log(shares)) / max(np.exp(x[1]), SHARPEST))
        likely = LAPSE + (1 - 2 * LAPSE) * likely
        return float(-np.sum(np.where(passed, np.log(likely), np.log(1 - likely))))

    found = minimize(unlikely, np.array([-0.1, np.log(0.1)]), method="Nelder-Mead")
    share, spread = np.exp(found.x)
    return MemoryLimit(float(share), float(max(spread, SHARPEST)))


def fit(
    kind: type[Constants],
    predict: Callable[[Constants], Floats],
    measured: Floats,
    start: Constants | None = None,
) -> Constants:
    """Returns the constants that bring log predictions closest to measurements.

    `predict` returns the shape and unit of `measured`.
    """
    priors = priors_of(kind)
    columns = ((p.value, p.spread, p.low, p.high) for p in priors.values())
    prior, spread, least, most = np.array(list(columns)).T
    low, high = (least - prior) / spread, (most - prior) / spread
    make: Callable[..., Constants] = kind

    def constants(x: Floats) -> Constants:
        values = np.clip(prior + x * spread, prior + low * spread, prior + high * spread)
        return make(**dict(zip(priors, values.tolist(), strict=True)))

    def residuals(x: Floats) -> Floats:
        errors = np.log(predict(constants(x)) / measured)
        return np.concatenate([errors, PRIOR_WEIGHT * SCALE * x])

    first = np.zeros(len(prior))
    if start is not None:
        first = (np.array([getattr(start, name) for name in priors]) - prior) / spread
    solution = least_squares(
        residuals,
        first,
        bounds=(low - 1e-6, high + 1e-6),
        loss="cauchy",
        f_scale=SCALE,
        max_nfev=MOST_EVALUATIONS,
        ftol=ENOUGH,
    )
    return constants(solution.x)


@dataclass(frozen=True)
class TransferWidths:
    """Half-widths of log 80% intervals; see ClusterSpread."""

    time: float
    time_per_doubling: float
    memory: float
    nodes: Widening
    shape: Widening


@dataclass(frozen=True)
class _Left:
    """Rows left out of a fit (each of shape [rows])."""

    time: Floats
    memory: Floats
    nodes: Floats
    """Doublings from one node."""
    distance: Floats
    """Doublings beyond what the fit has seen."""


def transfer_widths(sizes: Floats, nodes: Ints, inside: Errors) -> TransferWidths:
    """Returns half-widths that cover LEVEL of the rows left out.

    Each number of nodes is predicted from all others. Widenings are errors beyond those of a fit
    to all rows: of larger numbers predicted from each smaller range, and of models (`sizes` in
    parameters) predicted from others. `inside` must return errors if nothing is left out.
    """
    everything = np.ones(len(nodes), bool)
    counts, models = np.unique(nodes), np.unique(sizes)
    seen = _joined(sizes, nodes, inside, [(everything, everything)])
    assert seen is not None
    each = [(nodes != count, nodes == count) for count in counts] if len(counts) > 1 else []
    left = _joined(sizes, nodes, inside, each) or seen
    time, slope = _line(left.time, left.nodes)
    memory = float(np.nanquantile(left.memory, LEVEL))
    usual, rise = _line(seen.time, seen.nodes)
    usual_memory = float(np.nanquantile(seen.memory, LEVEL))
    larger = [(nodes <= count, nodes > count) for count in counts[:-1]]
    others = [(sizes != size, sizes == size) for size in models] if len(models) > 1 else []

    def wider(splits: list[tuple[Bools, Bools]], default: Widening) -> Widening:
        parts = [_joined(sizes, nodes, inside, [split]) for split in splits]
        used = [part for part in parts if part is not None and part.distance.any()]
        if not used:
            return default
        # Each range counts the same, however many rows are beyond it.
        times = [_growth(p.time - usual - rise * p.nodes, p.distance) for p in used]
        of_memory = [_growth(p.memory - usual_memory, p.distance) for p in used]
        return Widening(float(np.mean(times)), float(np.mean(of_memory)))

    return TransferWidths(
        time, slope, memory, wider(larger, ONE_NODE_COUNT), wider(others, ONE_MODEL)
    )


def _joined(
    sizes: Floats, nodes: Ints, inside: Errors, splits: list[tuple[Bools, Bools]]
) -> _Left | None:
    parts = list(_left_out(sizes, nodes, inside, splits))
    if not parts:
        return None
    return _Left(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _left_out(
    sizes: Floats, nodes: Ints, inside: Errors, splits: list[tuple[Bools, Bools]]
) -> Iterator[tuple[Floats, Floats, Floats, Floats]]:
    for seen, left in splits:
        errors = inside(seen, left)
        if errors is None:
            continue
        few, many = sizes[seen].min(), sizes[seen].max()
        size = np.maximum(np.log2(few / sizes[left]), np.log2(sizes[left] / many))
        more = np.log2(nodes[left] / nodes[seen].max())
        distance = np.maximum(0.0, size) + np.maximum(0.0, more)
        yield *errors, np.log2(nodes[left]), distance


def _line(errors: Floats, doublings: Floats) -> tuple[float, float]:
    """Returns the half-width at one node and its increase per doubling of the nodes.

    Minimises the pinball loss at LEVEL (Koenker and Bassett, 1978).
    """
    finite = np.isfinite(errors)

    def loss(x: Floats) -> float:
        over = errors[finite] - (abs(x[0]) + abs(x[1]) * doublings[finite])
        return float(np.mean(np.maximum(LEVEL * over, (LEVEL - 1) * over)))

    start = np.array([float(np.nanquantile(errors, LEVEL)), 0.01])
    base, slope = np.abs(minimize(loss, start, method="Nelder-Mead").x)
    return float(base), float(slope)


def _growth(excess: Floats, distance: Floats) -> float:
    """Returns the smallest slope whose line over `distance` covers LEVEL of the errors.

    `excess` is an error minus the width without distance.
    """
    used = np.isfinite(excess) & (distance > 0)
    rates, weights = excess[used] / distance[used], distance[used]
    order = np.argsort(rates)
    share = np.cumsum(weights[order]) / weights.sum()
    return max(0.0, float(rates[order][np.searchsorted(share, LEVEL)]))
