"""bench plan: predicts which strategy to train a model with, without any device."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from bench.cli.options import JsonObject, MeasuredHere

Value = TypeVar("Value")
MAX_EXPORTED = 1000
"""Number of best layouts that are searched for one with an export."""
MAX_PRICE = 1e9
"""Highest price of a device-hour, in any currency."""
TRIED_MATRIX = "full"
"""Source of the options to try for each strategy."""

if TYPE_CHECKING:
    from rich.table import Table

    from harness.planner.cluster.cluster_plan import ClusterCandidate, ClusterPlan
    from harness.planner.follow_up import StrategyOptions


def plan(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Model: a known name such as llama-8b, hf:PATH of a config.json, or sizes such as"
            " layers=32,hidden=4096,heads=32. With --here, a workload of the suite; by default the"
            " most-measured one.",
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option("--devices", help="Devices; by default 8, with --here 2."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="Device of docs/hosts.md; by default h100-80gb."),
    ] = None,
    per_node: Annotated[
        int | None,
        typer.Option("--per-node", help="Devices per node; by default 8, with --here 1."),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            "--link",
            help="Link inside a node and rate of each device to other nodes, by default"
            " nvlink,400gbit; or a measured cluster, playbook-h100. With --here, an emulated link"
            " between nodes such as 1gbit; by default none.",
        ),
    ] = None,
    seq: Annotated[
        int | None,
        typer.Option(
            "--seq",
            help="Sequence length in tokens; by default 4096, with --here the most-measured one.",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch",
            help="Global batch in sequences; by default 256, with --here the most-measured one.",
        ),
    ] = None,
    here: Annotated[
        bool,
        typer.Option(
            "--here",
            help="Predict this machine's CPU cores from cells measured on it.",
        ),
    ] = False,
    results: MeasuredHere = None,
    precision: Annotated[
        str | None,
        typer.Option("--precision", help="With --here: fp32 (default), bf16 or fp16."),
    ] = None,
    unseen: Annotated[
        bool,
        typer.Option(
            "--unseen",
            help="With --here: predict as if no cell of the model had been measured.",
        ),
    ] = False,
    goal: Annotated[
        str, typer.Option("--goal", help="What to rank by: throughput, memory, cost or energy.")
    ] = "throughput",
    price: Annotated[
        float | None, typer.Option("--price", help="Price of one device per hour.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Number of layouts to show.")] = 10,
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", help="Constants written by bench calibrate."),
    ] = None,
    matrix: Annotated[
        Path | None,
        typer.Option(
            "--matrix",
            help="Write a matrix of the cells that would settle which is best, for bench run.",
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            "--export",
            help="Write the choice to a new folder, as scripts and configs for torchrun, SLURM,"
            " Accelerate or DeepSpeed.",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            help="Write an HTML page: the answer, and what wins at other sizes.",
        ),
    ] = None,
    json_output: JsonObject = False,
) -> None:
    """Predict step time and memory of every layout of a training, and say which to choose.

    Example: [bold]python -m bench plan --model llama-8b --devices 64 --batch 1024[/bold]
    """
    from harness.spec.errors import UsageError

    if here:
        from bench.cli import plan_here
        from harness.planner.local.plan_request import PlanRequest

        for name, value in (
            ("--device", device),
            ("--price", price),
            ("--calibration", calibration),
        ):
            if value is not None:
                raise UsageError(f"{name} does not apply to this machine; leave it out with --here")
        request = PlanRequest(model, devices, per_node, link, seq, batch, precision, goal, unseen)
        options = plan_here.LocalPlanOptions(
            tuple(results or (Path("results"),)), top, matrix, export, html
        )
        plan_here.answer(request, options, json_output)
        return
    only_here = {"--results": bool(results), "--precision": bool(precision), "--unseen": unseen}
    for option, given in only_here.items():
        if given:
            raise UsageError(f"{option} needs --here")
    if model is None:
        raise UsageError("--model is missing; name one such as llama-8b, or add --here")
    from rich.markup import escape

    from bench.cli import terminal
    from harness.planner.cluster.calibration import DEFAULT, load
    from harness.planner.cluster.cluster_plan import explanation
    from harness.planner.cluster.cluster_plan import plan as predicted
    from harness.planner.cluster.hardware import cluster_of
    from harness.planner.cluster.model_shape import parse_shape
    from harness.planner.cluster.question import ClusterQuestion

    if price is not None and not 0 < price <= MAX_PRICE:
        raise UsageError(f"--price {price:g}: give a price above 0 and at most {MAX_PRICE:g}")
    cluster = cluster_of(
        device or "h100-80gb", default(per_node, 8), default(link, "nvlink,400gbit")
    )
    question = ClusterQuestion(
        parse_shape(model), cluster, default(seq, 4096), default(batch, 256), default(devices, 8)
    )
    constants = load(calibration or DEFAULT)
    answer = predicted(question, constants, goal, top, price)
    sentences = explanation(answer)
    written = _matrix_written(answer, model, matrix) if matrix else []
    if export:
        from harness.planner.follow_up import cells_of_layouts, export_first

        every = predicted(question, constants, goal, MAX_EXPORTED).candidates
        ranked = ((candidate.layout, candidate.seconds) for candidate in every)
        cells = cells_of_layouts(question, model, ranked, tried_options())
        written.append(export_first(cells, export))
    if html:
        from harness.planner.cluster.cluster_plan import sweep
        from reports import write_whole
        from reports.prediction_page import cluster_page

        squares = sweep(question, constants, goal)
        write_whole(cluster_page(answer, sentences, constants.source, squares), html, "--html")
        written.append(f"page: {html}")
    if json_output:
        document = dataclasses.asdict(answer) | {
            "explanation": sentences,
            "calibration": constants.source,
            "written": written,
        }
        print(json.dumps(document))
        return
    console = terminal.console()
    console.print(_table(answer))
    for sentence in sentences:
        console.print(escape(sentence))
    dropped = ", ".join(f"{count} for {reason}" for reason, count in answer.dropped.items())
    console.print(
        f"{answer.considered} layouts, left out because they would not run: {dropped or 'none'}"
    )
    console.print(escape(f"constants: {constants.source}"))
    for sentence in written:
        console.print(escape(sentence))


def _matrix_written(answer: ClusterPlan, model: str, file: Path) -> list[str]:
    """Writes the cells of the best layout and its ties; returns sentences to print."""
    from bench.cli.terminal import measure_command
    from harness.planner.follow_up import cells_of_layout, write_matrix

    first = answer.candidates[0]
    open_layouts = [
        candidate.layout
        for candidate in answer.candidates[1:]
        if candidate.seconds_low <= first.seconds_high
    ]
    tried = tried_options()
    by_layout = {
        layout: cells_of_layout(answer.question, model, layout, tried)
        for layout in (first.layout, *open_layouts)
    }
    cells = [cell for cells in by_layout.values() for cell in cells]
    written = write_matrix(file, cells, "Cells that a prediction ties.")
    sentences = [f"{written}; {measure_command(file)}"]
    if missing := [layout.text for layout, cells in by_layout.items() if not cells]:
        sentences.append(f"no strategy of the suite trains with: {'; '.join(missing)}")
    return sentences


def tried_options() -> list[StrategyOptions]:
    from bench.matrix import read_matrix
    from harness.planner.follow_up import StrategyOptions

    tried = []
    for axes in read_matrix(TRIED_MATRIX).cells:
        names, options = axes["strategy"], axes.get("options", {})
        for name in names if isinstance(names, list) else [names]:
            for values in options if isinstance(options, list) else [options]:
                tried.append(StrategyOptions(name, dict(values)))
    return tried


def default(given: Value | None, otherwise: Value) -> Value:
    """Returns `otherwise` only if `given` is None; 0 and empty texts count as given."""
    return otherwise if given is None else given


def _table(answer: ClusterPlan) -> Table:
    from rich.markup import escape
    from rich.table import Table

    question = answer.question
    table = Table(
        title=f"{question.shape.name} on {question.devices} x {question.cluster.device},"
        f" {question.global_batch} sequences of {question.sequence_length} tokens a step;"
        " predictions with their 80 % intervals",
        title_justify="left",
    )
    table.add_column("layout", overflow="fold", min_width=24)
    for column in ("step (s)", "tokens/s", "memory (GB)", "fits"):
        table.add_column(column, justify="right")
    priced = answer.candidates[0].price is not None
    if priced:
        table.add_column("price of 1e9 tokens", justify="right")
    if answer.goal == "energy":
        table.add_column("J/token", justify="right")
    for row in answer.candidates:
        table.add_row(
            f"{escape(row.strategy)}: {escape(row.layout.text)}",
            f"{row.seconds:.3g}\n({row.seconds_low:.3g} to {row.seconds_high:.3g})",
            f"{row.tokens_per_second:,.0f}",
            f"{row.reserved_bytes / 1e9:.1f}\n({row.reserved_low / 1e9:.0f} to"
            f" {row.reserved_high / 1e9:.0f})",
            f"{row.fits:.0%}",
            *([f"{row.price:.2f}"] if priced else []),
            *([_joules(row)] if row.joules_per_token is not None else []),
        )
    return table


def _joules(row: ClusterCandidate) -> str:
    return f"{row.joules_per_token:.3g}\n({row.joules_low:.2g} to {row.joules_high:.2g})"
