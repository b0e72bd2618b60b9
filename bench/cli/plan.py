from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from bench.cli.options import (
    Batch,
    Calibration,
    ClusterLink,
    ExportFolder,
    Goal,
    Gpus,
    Json,
    OwnRuns,
    Seq,
    StatesPrecision,
    Top,
    WrittenMatrix,
)
from harness.cell.errors import plural

if TYPE_CHECKING:
    from rich.table import Table

    from harness.planner.cluster.calibration import ClusterCalibration
    from harness.planner.cluster.cluster_plan import ClusterPlan
    from harness.planner.follow_up import FollowUp

MAX_RANKED = 1000
"""Number of layouts searched for ties and for an exportable one."""
MOST_NAMED = 5

Model: TypeAlias = Annotated[
    str,
    typer.Option(
        "--model",
        help="Model: a name such as llama-8b, hf:PATH of a config.json, or sizes such as"
        " layers=32,hidden=4096,heads=32.",
    ),
]
GpusPerNode: TypeAlias = Annotated[
    int, typer.Option("--gpus-per-node", help="Number of GPUs of each node.")
]
HostMemory: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--host-memory",
        help="Memory of a node's host, which limits offload. \\[default: twice the node's device"
        " memory]",
        show_default=False,
    ),
]
Price: TypeAlias = Annotated[
    float | None, typer.Option("--price", help="Price of one device per hour.")
]

Rehearse: TypeAlias = Annotated[
    int,
    typer.Option(
        "--rehearse",
        min=0,
        max=20,
        help="Number of layouts, best first, whose memory is also found by running the suite's code"
        " on fake tensors. Needs torch, and takes seconds for each.",
    ),
]
LikeProgram: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--like",
        help="Program that trains: nanotron, megatron, torchtitan, llm-foundry, fms-fsdp or"
        " deepspeed. \\[default: torch's own code, with all layouts]",
        show_default=False,
    ),
]
PlanLoss: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--loss",
        help="Loss of FSDP2's layouts: plain, fused, in-place or chunked (Liger)."
        " \\[default: that of --like, else plain]",
        show_default=False,
    ),
]


def plan(
    model: Model,
    gpus: Gpus = "8 x h100-80gb",
    gpus_per_node: GpusPerNode = 8,
    link: ClusterLink = "nvlink,400gbit",
    host_memory: HostMemory = None,
    seq: Seq = 4096,
    batch: Batch = 256,
    precision: StatesPrecision = "bf16",
    like: LikeProgram = None,
    loss: PlanLoss = None,
    goal: Goal = "throughput",
    price: Price = None,
    top: Top = 10,
    calibration: Calibration = None,
    results: OwnRuns = None,
    write_matrix: WrittenMatrix = None,
    export: ExportFolder = None,
    rehearse: Rehearse = 0,
    json_output: Json = False,
) -> None:
    """Predict the best layout for GPUs that you do not have yet.

    Predicts step time and memory of every layout of a training.

    Example: [bold]python -m bench plan --model llama-8b --gpus '64 x h100' --batch 1024[/bold]
    """
    from bench import api
    from bench.matrix import parse_bytes
    from harness.planner.cluster.cluster_plan import explanation

    answer = api.plan(
        model,
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        link=link,
        sequence_length=seq,
        batch=batch,
        precision=precision,
        like=like,
        loss=loss,
        goal=goal,
        price=price,
        top=top,
        calibration=calibration,
        results=results,
        rehearse=rehearse,
        host_memory_bytes=None if host_memory is None else parse_bytes(host_memory),
    )
    constants = api.plan_constants(calibration, results, answer.question.cluster)
    sentences = explanation(answer)
    prepared, written = _prepared(answer, constants, model, write_matrix, export)
    for follow_up in prepared:
        follow_up.check()
    for follow_up in prepared:
        follow_up.write()
    if json_output:
        print(json.dumps(_as_json(answer, sentences, constants) | {"written": written}))
        return
    _show(answer, sentences, constants.source, written)


def _as_json(
    answer: ClusterPlan, sentences: list[str], constants: ClusterCalibration
) -> dict[str, object]:
    return dataclasses.asdict(answer) | {
        "explanation": sentences,
        "calibration": constants.source,
        "anchor": constants.anchor and dataclasses.asdict(constants.anchor),
    }


def _prepared(
    answer: ClusterPlan,
    constants: ClusterCalibration,
    model: str,
    matrix: Path | None,
    export: Path | None,
) -> tuple[list[FollowUp], list[str]]:
    """Returns the files to write, and the sentences that say so."""
    if not matrix and not export:
        return [], []
    from bench.api import tried_options
    from bench.cli.terminal import measure_command
    from harness.planner.cluster.cluster_plan import plan as predicted
    from harness.planner.follow_up import cells_of_layouts, first_export

    prepared, written = [], []
    every = predicted(answer.question, constants, answer.goal, MAX_RANKED)
    if matrix:
        file, missing = _tied_cells(every, model, matrix)
        prepared.append(file)
        written += [f"{file.message}; {measure_command(matrix)}", *missing]
    if export:
        ranked = ((candidate.layout, candidate.seconds) for candidate in every.candidates)
        cells = cells_of_layouts(answer.question, model, ranked, tried_options())
        folders = first_export(cells, export)
        prepared.append(folders)
        written.append(folders.message)
    return prepared, written


def _show(answer: ClusterPlan, sentences: list[str], source: str, written: list[str]) -> None:
    from rich.markup import escape

    from bench.cli import terminal

    console = terminal.console()
    console.print(_table(answer))
    missing = [
        f"not rehearsed: {row.layout.text}: {row.rehearsal}"
        for row in answer.candidates
        if row.rehearsal and row.rehearsed_bytes is None
    ]
    for sentence in (*sentences, *missing):
        console.print(escape(sentence))
    dropped = ", ".join(f"{count:,} for {reason}" for reason, count in answer.dropped.items())
    console.print(
        f"{plural(answer.considered, 'layout')} considered; left out, as they cannot run:"
        f" {dropped or 'none'}"
    )
    console.print(escape(f"constants: {source}"))
    for sentence in written:
        console.print(escape(sentence))


def _tied_cells(every: ClusterPlan, model: str, file: Path) -> tuple[FollowUp, list[str]]:
    """Returns a matrix of cells tied with the first, and a sentence if layouts have none."""
    from bench.api import tried_options
    from harness.planner.cluster.cluster_plan import open_questions
    from harness.planner.follow_up import cells_of_layout, matrix_file

    tried, candidates = tried_options(), every.candidates
    by_layout = {
        candidate.layout: cells_of_layout(every.question, model, candidate.layout, tried)
        for candidate in (candidates[0], *open_questions(candidates, every.goal))
    }
    cells = [cell for cells in by_layout.values() for cell in cells]
    matrix = matrix_file(file, cells, "Cells whose predictions are tied.")
    missing = [layout.text for layout, cells in by_layout.items() if not cells]
    if len(missing) > MOST_NAMED:
        missing[MOST_NAMED:] = [f"{len(missing) - MOST_NAMED} more"]
    sentence = f"no strategy of the suite trains with: {'; '.join(missing)}"
    return matrix, [sentence] if missing else []


def _table(answer: ClusterPlan) -> Table:
    from rich.markup import escape

    from bench.cli import terminal
    from harness.planner.cluster.cluster_plan import GIB

    question = answer.question
    title = (
        f"{question.shape.name} on {question.devices} x {question.cluster.device},"
        f" {question.global_batch} sequences of {question.sequence_length} tokens a step,"
        f" {question.precision}{question.like and f', like {question.like}'};"
        " predictions with their 80% intervals"
    )
    table = terminal.table(title, "layout", "step (s)", "tokens/s", "reserved (GiB)", "fits")
    table.columns[0].min_width = 24
    priced = answer.candidates[0].price is not None
    if priced:
        table.add_column("price of 1e9 tokens", justify="right")
    if answer.goal == "energy":
        table.add_column("J/token", justify="right")
    with_rehearsals = any(row.rehearsed_bytes is not None for row in answer.candidates)
    if with_rehearsals:
        table.add_column("allocated, rehearsed (GiB)", justify="right")
    for row in answer.candidates:
        table.add_row(
            f"{escape(row.strategy)}: {escape(row.layout.text)}",
            f"{row.seconds:.3g}\n({row.seconds_low:.3g} to {row.seconds_high:.3g})",
            f"{row.tokens_per_second:,.0f}",
            f"{row.reserved_bytes / GIB:.1f}\n({row.reserved_low / GIB:.0f} to"
            f" {row.reserved_high / GIB:.0f})",
            f"{row.fits:.0%}",
            *([f"{row.price:.2f}"] if priced else []),
            *(
                [f"{row.joules_per_token:.3g}\n({row.joules_low:.2g} to {row.joules_high:.2g})"]
                if row.joules_per_token is not None
                else []
            ),
            *(
                [f"{row.allocated_bytes / GIB:.1f}\n{row.rehearsed_bytes / GIB:.1f}"]
                if row.rehearsed_bytes is not None
                else []
            ),
        )
    return table
