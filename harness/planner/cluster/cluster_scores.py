"""Scores predictions against measured runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import spearmanr

from harness.planner.cluster.calibrate import calibrate, groups, predicted
from harness.planner.cluster.calibration import ClusterCalibration
from harness.planner.cluster.cluster_plan import ranked
from harness.planner.cluster.hardware import Cluster
from harness.planner.cluster.layouts import PlannedLayout
from harness.planner.cluster.measured_runs import MeasuredRuns
from harness.planner.cluster.prediction import REFUSED_BELOW
from harness.planner.fitting import Bools, Floats, Ints

FEW = 20
"""Fewest consistent rows for a rank correlation."""
NEAR = 0.5
"""Speed, as a share of the group's best, from which a layout is worth considering."""


@dataclass(frozen=True)
class HeldOutRuns:
    """Predictions of rows that the calibration has not seen (arrays of shape [rows])."""

    seconds: Floats
    half_width: Floats
    upper: Floats
    """Half-width of the interval above the predicted time."""
    memory_bytes: Floats
    memory_half_width: Floats
    fits: Floats
    runs: Floats


@dataclass(frozen=True)
class ClusterScores:
    """Scores, as shares unless noted; consistent rows contradict no others."""

    rows: int
    consistent_rows: int
    time_error: float
    """Median error over consistent rows."""
    time_error_all: float
    near_error: float
    """Median error over consistent rows at least half as fast as their group's best."""
    memory_error: float
    """Median error over all measured rows."""
    rank_correlation: float
    """Smallest Spearman correlation of a large enough group; NaN without one."""
    pick_loss: float
    """Mean share by which the best-predicted layout is slower than the group's best; 1 if it
    failed."""
    top_three_loss: float
    """Like `pick_loss`, for the best of the three best-predicted layouts."""
    failures_foreseen: float
    """Share of failed rows that were predicted to fail."""
    false_alarms: float
    """Share of successful rows that were predicted to fail."""
    false_alarms_consistent: float
    covered: float
    """Share of consistent rows within the 80 % interval of the time."""
    covered_all: float
    memory_covered: float


@dataclass(frozen=True)
class PartErrors:
    """Median errors of some rows, as shares; NaN without measurements."""

    part: str
    rows: int
    time: float
    """Error over consistent rows."""
    time_all: float
    memory: float


def errors_by(
    runs: MeasuredRuns, held: HeldOutRuns, parts: Mapping[str, Bools]
) -> list[PartErrors]:
    ran, consistent = runs.ran, runs.consistent() & runs.ran
    time = np.abs(held.seconds / runs.seconds - 1)
    of_memory = np.abs(held.memory_bytes / runs.memory_bytes - 1)

    def median(values: Floats) -> float:
        return float(np.median(values)) if len(values) else float("nan")

    return [
        PartErrors(
            name,
            int((part & ran).sum()),
            median(time[part & consistent]),
            median(time[part & ran]),
            median(of_memory[part & ran]),
        )
        for name, part in parts.items()
    ]


def noise_of_twins(runs: MeasuredRuns) -> dict[str, float]:
    """Returns the standard deviation of a row's log time, by number of nodes.

    Estimated from twins that differ only in ZeRO stage (0 or 1), which hardly changes the time:
    their median distance over 0.954 (that of two standard normal values). NaN with fewer than three
    twins.
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
    """Predicts each part of the rows with a calibration fitted to all others."""
    return _predicted(
        runs, cluster, ((part, calibrate(runs.take(~part), cluster, "held out")) for part in parts)
    )


def _predicted(
    runs: MeasuredRuns, cluster: Cluster, parts: Iterable[tuple[Bools, ClusterCalibration]]
) -> HeldOutRuns:
    columns = {name: np.full(len(runs), np.nan) for name in HeldOutRuns.__dataclass_fields__}
    for part, calibration in parts:
        inside, places = runs.take(part), np.flatnonzero(part)
        for group, result in predicted(inside, cluster, calibration):
            rows = places[group.rows]
            columns["seconds"][rows] = result.seconds
            columns["half_width"][rows] = result.half_width
            columns["upper"][rows] = result.upper
            columns["memory_bytes"][rows] = result.memory.reserved
            columns["memory_half_width"][rows] = result.memory_half_width
            columns["fits"][rows] = result.fits
            columns["runs"][rows] = result.runs
    return HeldOutRuns(**columns)


def parts_by_model(runs: MeasuredRuns) -> dict[str, Bools]:
    return {name: runs.model_column == name for name in sorted(set(runs.models))}


def parts_by_nodes(runs: MeasuredRuns) -> dict[str, Bools]:
    return {f"{nodes} nodes": runs.nodes == nodes for nodes in np.unique(runs.nodes)}


def score(runs: MeasuredRuns, cluster: Cluster, held: HeldOutRuns) -> ClusterScores:
    ran, consistent = runs.ran, runs.consistent() & runs.ran
    with np.errstate(invalid="ignore"):
        errors = np.abs(held.seconds / runs.seconds - 1)
        logs = np.log(runs.seconds / held.seconds)
        of_memory = np.abs(held.memory_bytes / runs.memory_bytes - 1)
        memory_logs = np.abs(np.log(held.memory_bytes / runs.memory_bytes))
    near = np.zeros(len(runs), bool)
    correlations, picks, triples = [], [], []
    for group in groups(runs, cluster):
        rows = group.rows
        kept = rows & consistent
        if not kept.any():
            continue
        best = np.min(runs.seconds[rows & ran])
        near |= kept & (best / np.where(ran, runs.seconds, np.inf) >= NEAR)
        if kept.sum() >= FEW:
            correlations.append(spearmanr(held.seconds[kept], runs.seconds[kept]).statistic)
        losses = _losses(runs, held, np.flatnonzero(rows))
        picks.append(losses[0])
        triples.append(min(losses[:3]))
    inside = (-held.half_width <= logs) & (logs <= held.upper)
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
        covered=float(np.mean(inside[consistent])),
        covered_all=float(np.mean(inside[ran])),
        memory_covered=float(np.mean((memory_logs <= held.memory_half_width)[ran])),
    )


def _losses(runs: MeasuredRuns, held: HeldOutRuns, rows: Ints) -> list[float]:
    """Returns the share by which each layout is slower than the best, best-predicted first.

    Failed layouts get 1. A layout measured several times counts once, by its best run.
    """
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
