"""bench plan: which strategy to train a model with, before any device is rented."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli.options import JsonObject

if TYPE_CHECKING:
    from rich.table import Table

    from harness.planner.plan import Plan


def plan(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="A known model such as llama-8b, hf:PATH of a config.json, or sizes such as"
            " layers=32,hidden=4096,heads=32.",
        ),
    ],
    devices: Annotated[int, typer.Option("--devices", help="How many devices.")] = 8,
    device: Annotated[
        str, typer.Option("--device", help="A device of the table in docs/hosts.md.")
    ] = "h100-80gb",
    per_node: Annotated[int, typer.Option("--per-node", help="Devices of each node.")] = 8,
    link: Annotated[
        str,
        typer.Option(
            "--link",
            help="The link inside a node and the rate of each device to other nodes, such as"
            " nvlink,400gbit; or a measured cluster, playbook-h100.",
        ),
    ] = "nvlink,400gbit",
    seq: Annotated[int, typer.Option("--seq", help="Tokens of a sequence.")] = 4096,
    batch: Annotated[
        int, typer.Option("--batch", help="Sequences of a step, all devices together.")
    ] = 256,
    goal: Annotated[
        str, typer.Option("--goal", help="What to rank by: throughput, memory or cost.")
    ] = "throughput",
    price: Annotated[
        float | None, typer.Option("--price", help="Price of one device for an hour.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Layouts to show.")] = 10,
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", help="Constants that bench calibrate has written."),
    ] = None,
    json_output: JsonObject = False,
) -> None:
    """Predicts step time and memory of every layout of a training, and says which to choose.

    Example: [bold]python -m bench plan --model llama-8b --devices 64 --batch 1024[/bold]
    """
    from rich.markup import escape

    from bench.cli import terminal
    from harness.planner.calibration import DEFAULT, load
    from harness.planner.cluster import cluster_of
    from harness.planner.plan import plan as predicted
    from harness.planner.question import Question
    from harness.planner.shape import parse_shape
    from harness.planner.words import explanation
    from harness.spec.errors import UsageError

    if price is not None and price <= 0:
        raise UsageError(f"--price {price:g}: give a price above 0")
    question = Question(parse_shape(model), cluster_of(device, per_node, link), seq, batch, devices)
    constants = load(calibration or DEFAULT)
    answer = predicted(question, constants, goal, top, price)
    sentences = explanation(answer)
    if json_output:
        document = dataclasses.asdict(answer) | {
            "explanation": sentences,
            "calibration": constants.source,
        }
        print(json.dumps(document))
        return
    console = terminal.console()
    console.print(_table(answer))
    for sentence in sentences:
        console.print(escape(sentence))
    dropped = ", ".join(f"{count} for {reason}" for reason, count in answer.dropped.items())
    console.print(
        f"{answer.considered} layouts, left out as they would not run: {dropped or 'none'}"
    )
    console.print(escape(f"constants: {constants.source}"))


def _table(answer: Plan) -> Table:
    """The layouts, best first."""
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
    for row in answer.candidates:
        table.add_row(
            f"{escape(row.strategy)}: {escape(row.layout.text)}",
            f"{row.seconds:.3g}\n({row.seconds_low:.3g} to {row.seconds_high:.3g})",
            f"{row.tokens_per_second:,.0f}",
            f"{row.reserved_bytes / 1e9:.1f}\n({row.reserved_low / 1e9:.0f} to"
            f" {row.reserved_high / 1e9:.0f})",
            f"{row.fits:.0%}",
            *([f"{row.price:.2f}"] if priced else []),
        )
    return table
