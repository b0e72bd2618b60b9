"""bench validate and bench calibrate: compare the planner with measured runs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli.options import JsonObject, MeasuredHere

if TYPE_CHECKING:
    from rich.table import Table

    from harness.planner.cluster.calibrate import ClusterScores, PartErrors

_DATA = typer.Option(
    "--data",
    envvar="BENCH_PLANNER_DATA",
    help="CSV file of measured runs, with the columns of the Ultra-Scale Playbook's table.",
)
DataFile = Annotated[Path, _DATA]
MaybeDataFile = Annotated[Path | None, _DATA]
ModelShapes = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="Shape of a model in the file, such as 1B=layers=16,hidden=2048; may be repeated.",
    ),
]
DeviceName = Annotated[str, typer.Option("--device", help="Device that was measured.")]
PerNode = Annotated[int, typer.Option("--per-node", help="Devices per node.")]
LinkText = Annotated[str, typer.Option("--link", help="Its links, as in bench plan.")]
SequenceLength = Annotated[int, typer.Option("--seq", help="Sequence length in tokens.")]


def validate(
    data: MaybeDataFile = None,
    model: ModelShapes = None,
    device: DeviceName = "h100-80gb",
    per_node: PerNode = 8,
    link: LinkText = "playbook-h100",
    seq: SequenceLength = 4096,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            help="Constants to predict with, or default for those of the suite; without it, each"
            " model and each number of nodes is predicted from all others.",
        ),
    ] = None,
    here: Annotated[
        bool,
        typer.Option(
            "--here",
            help="Score predictions of this machine's CPU cells instead: each workload and each"
            " emulated link is predicted from all others.",
        ),
    ] = False,
    results: MeasuredHere = None,
    json_output: JsonObject = False,
) -> None:
    """Score predictions against measured runs.

    Example: [bold]python -m bench validate --data RUNS.csv[/bold]
    """
    if here:
        from bench.cli import validate_here

        validate_here.validate(tuple(results or (Path("results"),)), json_output)
        return
    from bench.cli import terminal
    from harness.planner.cluster import calibrate as scores
    from harness.planner.cluster.calibration import DEFAULT, load
    from harness.planner.cluster.hardware import cluster_of
    from harness.spec.errors import UsageError

    if results:
        raise UsageError("--results needs --here; give published runs as --data")
    if data is None:
        raise UsageError("--data is missing: give a table of measured runs, or add --here")
    runs = scores.read_runs(data, _shapes(model), seq)
    cluster = cluster_of(device, per_node, link)
    by_model, by_nodes = scores.parts_by_model(runs), scores.parts_by_nodes(runs)
    if calibration:
        file = DEFAULT if str(calibration) == "default" else calibration
        held = {"given constants": scores.predict_with(runs, cluster, load(file))}
    else:
        held = {
            f"each {name} predicted from all others": scores.hold_out(
                runs, cluster, list(parts.values())
            )
            for name, parts in (("model", by_model), ("number of nodes", by_nodes))
            if len(parts) > 1
        }
    if not held:
        raise UsageError(
            f"{str(data)!r} has runs of only one model and number of nodes, so none can be"
            " predicted from others; give --calibration default"
        )
    scored = {name: scores.score(runs, cluster, part) for name, part in held.items()}
    errors = {
        name: scores.errors_by(runs, part, {**by_model, **by_nodes}) for name, part in held.items()
    }
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
    for name in held:
        console.print(_scores(name, scored[name]))
        console.print(_errors(name, errors[name]))
    listed = ", ".join(f"{value:.1%} on {nodes}" for nodes, value in noise.items())
    console.print(f"noise of a row, from twins that differ only in ZeRO stage: {listed}")


def calibrate(
    data: DataFile,
    out: Annotated[Path, typer.Option("--out", help="File to write the constants to.")],
    model: ModelShapes = None,
    device: DeviceName = "h100-80gb",
    per_node: PerNode = 8,
    link: LinkText = "playbook-h100",
    seq: SequenceLength = 4096,
) -> None:
    """Fit the planner's constants to measured runs, within their physical bounds.

    Example: [bold]python -m bench calibrate --data RUNS.csv --out MY.yaml[/bold]
    """
    from harness.planner.cluster.calibrate import calibrate as fit
    from harness.planner.cluster.calibrate import read_runs
    from harness.planner.cluster.hardware import cluster_of
    from harness.spec.errors import UsageError

    runs = read_runs(data, _shapes(model), seq)
    source = f"{int(runs.ran.sum())} measured runs of {data.name} on {device}, links {link}"
    fitted = fit(runs, cluster_of(device, per_node, link), source)
    try:
        fitted.save(out)
    except OSError as error:
        raise UsageError(f"--out: cannot write {str(out)!r}: {error.strerror}") from None
    print(f"wrote {out}")


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
    from rich.table import Table

    table = Table(title=f"{name}: {scores.rows} measured rows", title_justify="left")
    table.add_column("score")
    table.add_column("value", justify="right")
    for field in dataclasses.fields(scores):
        value = getattr(scores, field.name)
        shown = f"{value:.2%}" if isinstance(value, float) else str(value)
        if field.name == "rank_correlation":
            shown = f"{value:.3f}"
        table.add_row(field.name.replace("_", " "), shown)
    return table


def _errors(name: str, parts: Sequence[PartErrors]) -> Table:
    from rich.table import Table

    table = Table(title=f"{name}: median errors", title_justify="left")
    table.add_column("part")
    for column in ("rows", "time, consistent rows", "time, all rows", "memory"):
        table.add_column(column, justify="right")
    for part in parts:
        table.add_row(
            part.part,
            str(part.rows),
            f"{part.time:.1%}",
            f"{part.time_all:.1%}",
            f"{part.memory:.1%}",
        )
    return table
