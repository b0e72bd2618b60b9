"""Fits the planner's constants to measured runs, and scores predictions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import minimize
from scipy.special import ndtr
from scipy.stats import spearmanr

from harness.planner.cluster.calibration import (
    CalibratedRange,
    ClusterCalibration,
    ClusterSpread,
    MemoryConstants,
    MemoryLimit,
    TimeConstants,
    Widening,
)
from harness.planner.cluster.hardware import Cluster
from harness.planner.cluster.layout_memory import memory
from harness.planner.cluster.model_names import parse_shape
from harness.planner.cluster.model_shape import ModelShape
from harness.planner.cluster.prediction import REFUSED_BELOW, Predictions, predict, ranked
from harness.planner.cluster.question import ClusterQuestion, PlannedLayout, PlannedLayouts
from harness.planner.cluster.step_time import step_time
from harness.planner.cluster.transfer import TransferWidths, transfer_widths
from harness.planner.fitting import Bools, Floats, Ints, fit
from harness.spec.errors import UsageError

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
FEWEST_RANKED = 20
FEWEST_NODE_COUNTS = 2
"""Numbers of nodes needed to predict a larger one."""
NEAR = 0.5
"""Speed relative to the group's best that makes a layout a contender."""


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
            f"{str(file)!r}: unknown model {unknown[0]!r}; known are {', '.join(models)}"
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


@dataclass(frozen=True)
class HeldOutRuns:
    """Predictions for rows the calibration did not see (shape [rows])."""

    seconds: Floats
    half_width: Floats
    upper: Floats
    """Half-width above the predicted time."""
    memory_bytes: Floats
    memory_half_width: Floats
    fits: Floats
    runs: Floats


@dataclass(frozen=True)
class ClusterScores:
    """Prediction scores, as shares unless noted."""

    rows: int
    consistent_rows: int
    time_error: float
    """Median over consistent rows."""
    time_error_all: float
    near_error: float
    """Median over rows at least half as fast as the best."""
    memory_error: float
    """Median over all measured rows."""
    rank_correlation: float
    """Lowest Spearman correlation of any large enough group, or NaN."""
    pick_loss: float
    """Mean slowdown of the first choice against the best; 1 if it failed."""
    top_three_loss: float
    """Mean slowdown of the best of the top three."""
    failures_foreseen: float
    false_alarms: float
    false_alarms_consistent: float
    covered: float
    covered_all: float
    memory_covered: float


@dataclass(frozen=True)
class PartErrors:
    """Median errors and coverage of 80 % intervals, as shares; NaN without measurements."""

    part: str
    rows: int
    time: float
    time_all: float
    memory: float
    covered: float
    """Share of consistent rows within the interval of the time."""
    covered_all: float
    memory_covered: float


def inside(runs: MeasuredRuns, held: HeldOutRuns) -> tuple[Bools, Bools]:
    """Returns which rows are within the intervals of time and of memory."""
    with np.errstate(invalid="ignore"):
        logs = np.log(runs.seconds / held.seconds)
        memory_logs = np.abs(np.log(held.memory_bytes / runs.memory_bytes))
    time: Bools = (-held.half_width <= logs) & (logs <= held.upper)
    of_memory: Bools = memory_logs <= held.memory_half_width
    return time, of_memory


def errors_by(
    runs: MeasuredRuns, held: HeldOutRuns, parts: Mapping[str, Bools]
) -> list[PartErrors]:
    predicted = np.isfinite(held.seconds)
    ran = runs.ran & predicted
    consistent = runs.consistent() & ran
    in_time, in_memory = inside(runs, held)
    time = np.abs(held.seconds / runs.seconds - 1)
    of_memory = np.abs(held.memory_bytes / runs.memory_bytes - 1)

    def median(values: Floats) -> float:
        return float(np.median(values)) if len(values) else float("nan")

    def share(values: Bools) -> float:
        return float(np.mean(values)) if len(values) else float("nan")

    return [
        PartErrors(
            name,
            int((part & ran).sum()),
            median(time[part & consistent]),
            median(time[part & ran]),
            median(of_memory[part & ran]),
            share(in_time[part & consistent]),
            share(in_time[part & ran]),
            share(in_memory[part & ran]),
        )
        for name, part in parts.items()
        if (part & ran).any()
    ]


def noise_of_twins(runs: MeasuredRuns) -> dict[str, float]:
    """Returns the standard deviation of a row's log time, by number of nodes.

    Twins differ only in ZeRO stage (0 or 1). Their median distance is divided by 0.954, its value
    for two standard normals; NaN below three twins.
    """
    kept = np.flatnonzero(runs.ran & runs.consistent())
    seconds: dict[tuple[str, PlannedLayout], float] = {}
    distances: dict[str, list[float]] = {}
    for row in kept:
        layout = runs.layouts[int(row)]
        plain = replace(layout, zero=0)
        twin = seconds.get((runs.models[row], plain))
        if layout.zero == 0:
            seconds[runs.models[row], plain] = float(runs.seconds[row])
        elif twin:
            distance = abs(float(np.log(runs.seconds[row] / twin)))
            distances.setdefault(f"{runs.nodes[row]} nodes", []).append(distance)
    return {
        name: float(np.median(values)) / 0.954 if len(values) > 2 else float("nan")
        for name, values in sorted(distances.items())
    }


def predict_with(
    runs: MeasuredRuns, cluster: Cluster, calibration: ClusterCalibration
) -> HeldOutRuns:
    return _predicted(runs, cluster, [(np.ones(len(runs), bool), calibration)])


def hold_out(runs: MeasuredRuns, cluster: Cluster, parts: list[Bools]) -> HeldOutRuns:
    """Predicts each part with a calibration fitted to the others."""
    return _predicted(
        runs, cluster, ((part, calibrate(runs.take(~part), cluster, "held out")) for part in parts)
    )


def extrapolate(runs: MeasuredRuns, cluster: Cluster) -> HeldOutRuns | None:
    """Predicts each number of nodes from at least two smaller ones.

    Other rows are NaN. Returns None below three numbers.
    """
    counts = np.unique(runs.nodes)[FEWEST_NODE_COUNTS:]
    if not len(counts):
        return None
    parts = (
        (runs.nodes == n, calibrate(runs.take(runs.nodes < n), cluster, "fewer")) for n in counts
    )
    return _predicted(runs, cluster, parts)


def _predicted(
    runs: MeasuredRuns, cluster: Cluster, parts: Iterable[tuple[Bools, ClusterCalibration]]
) -> HeldOutRuns:
    columns = {name: np.full(len(runs), np.nan) for name in HeldOutRuns.__dataclass_fields__}
    for part, calibration in parts:
        inside, places = runs.take(part), np.flatnonzero(part)
        for group, result in predicted(inside, cluster, calibration):
            rows = places[group.rows]
            for name in columns.keys() - {"memory_bytes"}:
                columns[name][rows] = getattr(result, name)
            columns["memory_bytes"][rows] = result.memory.reserved
    return HeldOutRuns(**columns)


def parts_by_model(runs: MeasuredRuns) -> dict[str, Bools]:
    return {name: runs.model_column == name for name in sorted(set(runs.models))}


def parts_by_nodes(runs: MeasuredRuns) -> dict[str, Bools]:
    return {f"{nodes} nodes": runs.nodes == nodes for nodes in np.unique(runs.nodes)}


def score(runs: MeasuredRuns, cluster: Cluster, held: HeldOutRuns) -> ClusterScores:
    ran, consistent = runs.ran, runs.consistent() & runs.ran
    with np.errstate(invalid="ignore"):
        errors = np.abs(held.seconds / runs.seconds - 1)
        of_memory = np.abs(held.memory_bytes / runs.memory_bytes - 1)
    near = np.zeros(len(runs), bool)
    correlations, picks, triples = [], [], []
    for group in groups(runs, cluster):
        rows = group.rows
        kept = rows & consistent
        if not kept.any():
            continue
        best = np.min(runs.seconds[rows & ran])
        near |= kept & (best / np.where(ran, runs.seconds, np.inf) >= NEAR)
        if kept.sum() >= FEWEST_RANKED:
            correlations.append(spearmanr(held.seconds[kept], runs.seconds[kept]).statistic)
        losses = _losses(runs, held, np.flatnonzero(rows))
        picks.append(losses[0])
        triples.append(min(losses[:3]))
    in_time, in_memory = inside(runs, held)
    said = held.runs < REFUSED_BELOW
    return ClusterScores(
        rows=int(ran.sum()),
        consistent_rows=int(consistent.sum()),
        time_error=float(np.median(errors[consistent])),
        time_error_all=float(np.median(errors[ran])),
        near_error=float(np.median(errors[near])),
        memory_error=float(np.nanmedian(of_memory[ran])),
        rank_correlation=float(min(correlations, default=np.nan)),
        pick_loss=float(np.mean(picks)),
        top_three_loss=float(np.mean(triples)),
        failures_foreseen=float(np.mean(said[~ran])) if (~ran).any() else float("nan"),
        false_alarms=float(np.mean(said[ran])),
        false_alarms_consistent=float(np.mean(said[consistent])),
        covered=float(np.mean(in_time[consistent])),
        covered_all=float(np.mean(in_time[ran])),
        memory_covered=float(np.mean(in_memory[ran])),
    )


def _losses(runs: MeasuredRuns, held: HeldOutRuns, rows: Ints) -> list[float]:
    best = float(np.nanmin(runs.seconds[rows]))
    losses: dict[PlannedLayout, float] = {}
    first: list[int] = []
    for row in rows.tolist():
        loss = 1 - best / runs.seconds[row] if runs.ran[row] else 1.0
        layout = runs.layouts[row]
        if layout not in losses:
            first.append(row)
        losses[layout] = min(losses.get(layout, 1.0), float(loss))
    columns = (held.seconds, held.fits, held.memory_bytes, held.half_width)
    order = ranked(*(column[np.array(first)] for column in columns))
    return [losses[runs.layouts[first[place]]] for place in order]
