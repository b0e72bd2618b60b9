from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from bench.cli.options import Calibration, ClusterLink, Device, Json, PerNode, Seq

if TYPE_CHECKING:
    from rich.table import Table

    from harness.planner.cluster.calibrate import ClusterScores, MeasuredRuns, PartErrors
    from harness.planner.cluster.hardware import Cluster

DATA_VARIABLE = "BENCH_PLANNER_DATA"
DEVICE, DEVICES_PER_NODE, LINK, SEQUENCE = "h100-80gb", 8, "playbook-h100", 4096
"""Defaults of options for a cluster's runs."""
MORE_NODES = "each number of nodes predicted from smaller ones"

Data: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="CSV file of runs measured on a cluster, with the columns of the Ultra-Scale"
        " Playbook's table; by default $BENCH_PLANNER_DATA.",
    ),
]
Shapes: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="Shape of a model in the file, such as 1B=layers=16,hidden=2048; may be repeated.",
    ),
]
Fit: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--fit",
        help="File for the planner's constants, fitted to these runs within physical bounds, for"
        " bench plan --calibration.",
    ),
]


def validate(
    data: Data = None,
    model: Shapes = None,
    device: Device = DEVICE,
    per_node: PerNode = DEVICES_PER_NODE,
    link: ClusterLink = LINK,
    seq: Seq = SEQUENCE,
    calibration: Calibration = None,
    fit: Fit = None,
    json_output: Json = False,
) -> None:
    """Score predictions against measured runs, or fit them.

    Given --calibration it uses these constants; otherwise each model and number of nodes is
    predicted from all others.

    Example: [bold]python -m bench validate --data RUNS.csv[/bold]
    """
    from harness.planner.cluster.calibrate import read_runs
    from harness.planner.cluster.hardware import cluster_of
    from harness.spec.errors import UsageError

    if fit and calibration:
        raise UsageError("--fit finds the constants: leave out --calibration")
    file = data or Path(os.environ.get(DATA_VARIABLE, ""))
    if not file.name:
        raise UsageError("give measured runs: --data FILE")
    runs = read_runs(file, _shapes(model), seq)
    cluster = cluster_of(device, per_node, link)
    if fit:
        source = f"{int(runs.ran.sum())} measured runs of {file.name} on {device}, links {link}"
        _fit(runs, cluster, source, fit, json_output)
    else:
        _validate_cluster(file, runs, cluster, calibration, json_output)


def _fit(runs: MeasuredRuns, cluster: Cluster, source: str, out: Path, json_output: bool) -> None:
    from harness.planner.cluster.calibrate import calibrate
    from harness.spec.errors import UsageError

    fitted = calibrate(runs, cluster, source)
    try:
        fitted.save(out)
    except OSError as error:
        raise UsageError(f"--fit: cannot write {str(out)!r}: {error.strerror}") from None
    written = f"wrote {out}"
    print(json.dumps({"calibration": source, "written": [written]}) if json_output else written)


def _validate_cluster(
    file: Path, runs: MeasuredRuns, cluster: Cluster, calibration: Path | None, json_output: bool
) -> None:
    from bench.cli import terminal
    from harness.planner.cluster import calibrate as scores
    from harness.planner.cluster.calibration import calibration_file, load
    from harness.spec.errors import UsageError

    by_model, by_nodes = scores.parts_by_model(runs), scores.parts_by_nodes(runs)
    if calibration:
        constants = load(calibration_file(calibration))
        held = {"given constants": scores.predict_with(runs, cluster, constants)}
    else:
        held = {
            f"each {name} predicted from all others": scores.hold_out(
                runs, cluster, list(parts.values())
            )
            for name, parts in (("model", by_model), ("number of nodes", by_nodes))
            if len(parts) > 1
        }
    more_nodes = None if calibration else scores.extrapolate(runs, cluster)
    if not held:
        raise UsageError(
            f"{str(file)!r} has runs of only one model and number of nodes, so none can be"
            " predicted from others; give --calibration default"
        )
    scored = {name: scores.score(runs, cluster, part) for name, part in held.items()}
    errors = {
        name: scores.errors_by(runs, part, {**by_model, **by_nodes}) for name, part in held.items()
    }
    if more_nodes:
        errors[MORE_NODES] = scores.errors_by(runs, more_nodes, {**by_model, **by_nodes})
    noise = scores.noise_of_twins(runs)
    if json_output:
        document = {
            "scores": {name: dataclasses.asdict(value) for name, value in scored.items()},
            "errors": {
                name: [dataclasses.asdict(part) for part in parts] for name, parts in errors.items()
            },
            "noise": noise,
        }
        print(json.dumps(_without_nan(document)))
        return
    console = terminal.console()
    for name, parts in errors.items():
        if name in scored:
            console.print(_scores(name, scored[name]))
        console.print(_errors(name, parts))
    listed = ", ".join(f"{value:.1%} on {nodes}" for nodes, value in noise.items())
    console.print(f"noise of a row, from pairs that differ only in ZeRO stage: {listed}")


def _shapes(models: Sequence[str] | None) -> dict[str, str]:
    from harness.planner.cluster.calibrate import MODELS
    from harness.spec.errors import UsageError

    shapes = dict(MODELS)
    for text in models or []:
        name, _, shape = text.partition("=")
        if not shape:
            raise UsageError(f"--model {text!r}: write NAME=SHAPE, such as 1B=llama-1b")
        shapes[name] = shape
    return shapes


def _without_nan(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_nan(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _scores(name: str, scores: ClusterScores) -> Table:
    from bench.cli import terminal

    table = terminal.table(f"{name}: {scores.rows} measured rows", "score", "value")
    for field in dataclasses.fields(scores):
        value = getattr(scores, field.name)
        shown = f"{value:.2%}" if isinstance(value, float) else str(value)
        if field.name == "rank_correlation":
            shown = f"{value:.3f}"
        table.add_row(field.name.replace("_", " "), shown)
    return table


def _errors(name: str, parts: Sequence[PartErrors]) -> Table:
    from bench.cli import terminal

    columns = ("part", "rows", "time", "all rows", "memory", "in 80 %", "all rows", "memory")
    table = terminal.table(f"{name}: median errors, and rows in intervals", *columns)
    for part in parts:
        table.add_row(
            part.part,
            str(part.rows),
            f"{part.time:.1%}",
            f"{part.time_all:.1%}",
            f"{part.memory:.1%}",
            f"{part.covered:.0%}",
            f"{part.covered_all:.0%}",
            f"{part.memory_covered:.0%}",
        )
    return table
