from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from bench.cli.options import Batch, Devices, Json, Precision, Seq

if TYPE_CHECKING:
    from rich.table import Table

    from harness.cell.cell import Cell
    from harness.planner.rehearsal.rehearse import Rehearsal

Answer: TypeAlias = "tuple[Cell, Rehearsal | None, str]"
"""A cell, and its rehearsal or the reason why its memory is unknown."""

Strategies: TypeAlias = Annotated[
    list[str],
    typer.Argument(
        metavar="STRATEGY",
        help="Strategies, optionally with options: fsdp2:reshard_after_forward=false.",
    ),
]
MicroBatches: TypeAlias = Annotated[
    int,
    typer.Option(
        "--micro-batches",
        min=1,
        help="Micro-batches that each rank splits its share of the batch into.",
    ),
]
Workload: TypeAlias = Annotated[
    str,
    typer.Option(
        "--model",
        help="Model: a workload (see: python -m bench list workloads), hf:PATH, or your own as"
        " FILE.py:CLASS.",
    ),
]
Optimizer: TypeAlias = Annotated[
    Literal["adamw", "sgd"], typer.Option("--optimizer", help="AdamW, or SGD with momentum.")
]
Ranks: TypeAlias = Annotated[
    list[int] | None,
    typer.Option(
        "--rank",
        help=(
            "Rehearse only this rank; may be repeated. By default all ranks if there are at most"
            " 8, else the first rank of each pipeline stage."
        ),
    ),
]
EveryBlock: TypeAlias = Annotated[
    bool, typer.Option("--every-block", help="Rehearse every block; do not extrapolate.")
]


def rehearse(
    strategies: Strategies,
    model: Workload = "llama-mini",
    devices: Devices = 2,
    batch: Batch = 8,
    seq: Seq = 64,
    micro_batches: MicroBatches = 1,
    precision: Precision = "fp32",
    optimizer: Optimizer = "adamw",
    rank: Ranks = None,
    every_block: EveryBlock = False,
    json_output: Json = False,
) -> None:
    """Find the memory that training needs by running its code without data.

    Example: [bold]python -m bench rehearse ddp fsdp2 --model llama-7b --devices 64 --batch
    64[/bold]
    """
    from harness.cell.errors import UsageError

    common = {
        "workload": model,
        "devices": devices,
        "global_batch": batch,
        "sequence_length": seq,
        "micro_batches": micro_batches,
        "precision": precision,
        "optimizer": optimizer,
    }
    cells = [_cell(word, common) for word in strategies]
    answers = [(cell, *_rehearsed(cell, rank or (), every_block)) for cell in cells]
    if not any(rehearsal for _, rehearsal, _ in answers):
        raise UsageError("; ".join(dict.fromkeys(reason for *_, reason in answers)))
    if json_output:
        print(json.dumps([_document(*answer) for answer in answers]))
        return
    _show(answers)


def _rehearsed(cell: Cell, ranks: Sequence[int], every_block: bool) -> tuple[Rehearsal | None, str]:
    """Returns the rehearsal, or why the cell's memory is unknown."""
    from harness.cell.errors import Refused, Unavailable, UsageError
    from harness.planner.rehearsal.rehearse import rehearse as rehearse_cell
    from harness.planner.rehearsal.world import quiet

    try:
        with quiet():
            return rehearse_cell(cell, ranks, every_block), ""
    except UsageError as reason:
        return None, str(reason)
    except (Refused, Unavailable) as reason:
        return None, f"{cell.name} cannot be rehearsed: {reason}"


def _cell(word: str, common: dict[str, object]) -> Cell:
    from pydantic import ValidationError

    from bench.select import split_options, with_options
    from harness.cell.cell import Cell
    from harness.cell.errors import UsageError, first_error
    from harness.seam.registry import make_strategy

    strategy, options = split_options(word)
    try:
        cell = Cell.model_validate({"strategy": strategy, **common})
    except ValidationError as error:
        raise UsageError(first_error(error)) from None
    make_strategy(cell)
    return cell if options is None else with_options(cell, options)


def _document(cell: Cell, rehearsal: Rehearsal | None, reason: str) -> dict[str, object]:
    fullest = rehearsal.fullest if rehearsal else None
    return {
        "cell": cell.model_dump(mode="json"),
        "fullest_rank": fullest and fullest.rank,
        "peak_bytes": fullest and fullest.peak_bytes,
        "ranks": [asdict(rank) for rank in rehearsal.ranks] if rehearsal else [],
        "unknown": reason or None,
    }


def _show(answers: Sequence[Answer]) -> None:
    from rich.markup import escape

    from bench.cli import terminal

    console = terminal.console()
    console.print(_table(answers))
    for cell, rehearsal, reason in answers:
        text = reason
        if rehearsal:
            fullest = rehearsal.fullest
            blocks = ", ".join(map(str, fullest.rehearsed_blocks))
            how = f"extrapolated from {blocks} blocks" if "," in blocks else "whole"
            seconds = sum(rank.seconds for rank in rehearsal.ranks)
            late = fullest.backend_buffer_bytes
            more = f"; up to {_size(late)} more if gloo's threads free memory late" if late else ""
            text = (
                f"{cell.name}: fullest in phase {fullest.peak_phase},"
                f" {fullest.peak_block}{more}; model {how}; {terminal.duration(seconds)}"
            )
        console.print(escape(text))
    console.print(
        "Memory of tensors as torch's allocator counts it, without fragmentation, the Python"
        " process, the GPU context and kernel workspaces."
    )


def _table(answers: Sequence[Answer]) -> Table:
    from rich.markup import escape

    from bench.cli import terminal

    title = "memory of a rank's tensors at the peak of a step"
    columns = ["rank", "peak", "parameters", "gradients", "optimizer", "activations", "buffers"]
    columns += ["temporaries", "set-up peak", "between steps"]
    table = terminal.table(title, "strategy", *columns)
    for cell, rehearsal, _ in answers:
        if rehearsal is None:
            table.add_row(escape(cell.label), "-", "unknown")
            continue
        for rank in rehearsal.ranks:
            sizes = [rank.peak_bytes, *rank.at_peak.values()]
            sizes += [rank.setup_peak_bytes, rank.kept_bytes]
            table.add_row(escape(cell.label), str(rank.rank), *map(_size, sizes))
    return table


def _size(size: int) -> str:
    gibibytes = size / 2**30
    return f"{gibibytes:.2f} GiB" if gibibytes >= 1 else f"{size / 2**20:.1f} MiB"
