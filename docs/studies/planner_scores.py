"""Scores the planner's predictions against runs measured on a cluster, or fits them.

`.venv/bin/python -m docs.studies.planner_scores --data RUNS.csv` prints the scores of
docs/studies/planner-accuracy.md. Given `--calibration` it uses these constants; otherwise each
model and number of nodes is predicted from all others. `--fit FILE` writes fitted constants.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer
from scipy.stats import spearmanr

from bench.cli.options import Calibration, ClusterLink, Json, Seq
from bench.cli.plan import GpusPerNode
from docs.studies.planner_calibration import (
    MODELS,
    MeasuredRuns,
    calibrate,
    groups,
    predicted,
    read_runs,
    save,
)
from harness.cell.errors import UsageError
from harness.planner.cluster.calibration import (
    Bools,
    ClusterCalibration,
    Floats,
    Ints,
    calibration_file,
    load,
)
from harness.planner.cluster.hardware import Cluster, cluster_of
from harness.planner.cluster.prediction import REFUSED_BELOW, ranked
from harness.planner.cluster.question import PlannedLayout

FEWEST_RANKED = 20
FEWEST_NODE_COUNTS = 2
"""Numbers of nodes needed to predict a larger one."""
NEAR = 0.5
"""Speed relative to the group's best that makes a layout a contender."""
DATA_VARIABLE = "BENCH_PLANNER_DATA"
GIVEN, MORE_NODES = "given constants", "each number of nodes predicted from smaller ones"


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


def inside(runs: MeasuredRuns, held: HeldOutRuns) -> tuple[Bools, Bools]:
    """Returns which rows are within the intervals of time and of memory."""
    with np.errstate(invalid="ignore"):
        logs = np.log(runs.seconds / held.seconds)
        memory_logs = np.abs(np.log(held.memory_bytes / runs.memory_bytes))
    time: Bools = (-held.half_width <= logs) & (logs <= held.upper)
    of_memory: Bools = memory_logs <= held.memory_half_width
    return time, of_memory


def errors_by(runs: MeasuredRuns, held: HeldOutRuns, parts: Mapping[str, Bools]) -> pd.DataFrame:
    """Returns for each part with measurements its number of runs, median errors and shares in 80%
    intervals, in time over consistent and over all rows, and in memory."""
    ran = runs.ran & np.isfinite(held.seconds)
    consistent = runs.consistent() & ran
    in_time, in_memory = inside(runs, held)
    time = np.abs(held.seconds / runs.seconds - 1)
    of_memory = np.abs(held.memory_bytes / runs.memory_bytes - 1)
    rows = [
        {
            "part": name,
            "rows": int((part & ran).sum()),
            "time": np.median(time[part & consistent]),
            "time_all": np.median(time[part & ran]),
            "memory": np.median(of_memory[part & ran]),
            "covered": np.mean(in_time[part & consistent]),
            "covered_all": np.mean(in_time[part & ran]),
            "memory_covered": np.mean(in_memory[part & ran]),
        }
        for name, part in parts.items()
        if (part & consistent).any()
    ]
    return pd.DataFrame(rows).set_index("part")


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


def score(runs: MeasuredRuns, cluster: Cluster, held: HeldOutRuns) -> pd.Series:
    """Returns median errors and shares. `near` means at least half as fast as the group's best; the
    rank correlation is the lowest of a large enough group; losses are mean slowdowns of the first
    choice, or of the best of three, and 1 if it failed."""
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
    return pd.Series(
        {
            "rows": int(ran.sum()),
            "consistent_rows": int(consistent.sum()),
            "time_error": float(np.median(errors[consistent])),
            "time_error_all": float(np.median(errors[ran])),
            "near_error": float(np.median(errors[near])),
            "memory_error": float(np.nanmedian(of_memory[ran])),
            "rank_correlation": float(min(correlations, default=np.nan)),
            "pick_loss": float(np.mean(picks)),
            "top_three_loss": float(np.mean(triples)),
            "failures_foreseen": float(np.mean(said[~ran])) if (~ran).any() else float("nan"),
            "false_alarms": float(np.mean(said[ran])),
            "false_alarms_consistent": float(np.mean(said[consistent])),
            "covered": float(np.mean(in_time[consistent])),
            "covered_all": float(np.mean(in_time[ran])),
            "memory_covered": float(np.mean(in_memory[ran])),
        }
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


def shapes_named(models: Sequence[str]) -> dict[str, str]:
    """Returns shapes by model; raises UsageError if one is not NAME=SHAPE."""
    shapes = dict(MODELS)
    for text in models:
        name, _, shape = text.partition("=")
        if not shape:
            raise UsageError(f"--model {text!r}: write NAME=SHAPE, such as 1B=llama-1b")
        shapes[name] = shape
    return shapes


def held_out(
    runs: MeasuredRuns, cluster: Cluster, constants: ClusterCalibration | None
) -> dict[str, HeldOutRuns]:
    """Returns predictions by what they were made from; raises UsageError if nothing can be left
    out of a fit."""
    if constants:
        return {GIVEN: _predicted(runs, cluster, [(np.ones(len(runs), bool), constants)])}
    parts = {"model": parts_by_model(runs), "number of nodes": parts_by_nodes(runs)}
    held = {
        f"each {name} predicted from all others": hold_out(runs, cluster, list(rows.values()))
        for name, rows in parts.items()
        if len(rows) > 1
    }
    if not held:
        raise UsageError(
            "these runs are of only one model and number of nodes, so none can be predicted from"
            " others; give --calibration default"
        )
    if more_nodes := extrapolate(runs, cluster):
        held[MORE_NODES] = more_nodes
    return held


def main(
    data: Annotated[Path | None, typer.Option("--data", help="CSV file of runs.")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="Shape of a model, such as 1B=layers=16,hidden=2048."),
    ] = None,
    gpu: Annotated[str, typer.Option("--gpu", help="GPU of the runs.")] = "h100-80gb",
    gpus_per_node: GpusPerNode = 8,
    link: ClusterLink = "playbook-h100",
    seq: Seq = 4096,
    calibration: Calibration = None,
    fit: Annotated[Path | None, typer.Option("--fit", help="File for fitted constants.")] = None,
    json_output: Json = False,
) -> None:
    file = data or Path(os.environ.get(DATA_VARIABLE, ""))
    if not file.name:
        raise UsageError(f"give measured runs: --data FILE, or ${DATA_VARIABLE}")
    if fit and calibration:
        raise UsageError("--fit finds the constants: leave out --calibration")
    runs = read_runs(file, shapes_named(model or ()), seq)
    cluster = cluster_of(gpu, gpus_per_node, link)
    if fit:
        source = f"{int(runs.ran.sum())} measured runs of {file.name} on {gpu}, links {link}"
        save(calibrate(runs, cluster, source), fit)
        print(f"wrote {fit}: {source}")
        return
    held = held_out(runs, cluster, load(calibration_file(calibration)) if calibration else None)
    parts = {**parts_by_model(runs), **parts_by_nodes(runs)}
    document = {
        "scores": {
            name: score(runs, cluster, one).to_dict()
            for name, one in held.items()
            if name != MORE_NODES
        },
        "errors": {
            name: errors_by(runs, one, parts).reset_index().to_dict("records")
            for name, one in held.items()
        },
    }
    if json_output:
        print(pd.Series(document).to_json())
        return
    print(pd.DataFrame(document["scores"]).round(4).to_string())
    for name, rows in document["errors"].items():
        print(f"\n{name}: median errors, and shares of rows in 80% intervals")
        print(pd.DataFrame(rows).set_index("part").round(3).to_string())


if __name__ == "__main__":
    try:
        typer.run(main)
    except UsageError as error:
        sys.exit(str(error))
