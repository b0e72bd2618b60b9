from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from bench.cli.options import Batch, Devices, Json, Precision, Seq, Workload

if TYPE_CHECKING:
    from rich.table import Table

    from harness.planner.rehearsal.allocator import AllocatedMemory
    from harness.planner.rehearsal.rehearse import Rehearsal
    from harness.spec.cell import Cell

Strategies: TypeAlias = Annotated[
    list[str],
    typer.Argument(
        metavar="STRATEGY...",
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
Measure: TypeAlias = Annotated[
    bool, typer.Option("--measure", help="Also train on this machine, and compare.")
]


def rehearse(
    strategies: Strategies,
    workload: Workload = "llama-mini",
    devices: Devices = 2,
    batch: Batch = 8,
    seq: Seq = 64,
    micro_batches: MicroBatches = 1,
    precision: Precision = "fp32",
    optimizer: Optimizer = "adamw",
    rank: Ranks = None,
    every_block: EveryBlock = False,
    measured: Measure = False,
    json_output: Json = False,
) -> None:
    """Find the memory that training needs by running its code without data.

    Example: [bold]python -m bench rehearse ddp fsdp2 --workload llama-7b --devices 64 --batch
    64[/bold]
    """
    from harness.planner.rehearsal.allocator import measure

    common = {
        "workload": workload,
        "devices": devices,
        "global_batch": batch,
        "sequence_length": seq,
        "micro_batches": micro_batches,
        "precision": precision,
        "optimizer": optimizer,
    }
    cells = [_cell(word, common) for word in strategies]
    rehearsals: list[Rehearsal] = []
    real: list[Sequence[AllocatedMemory]] = []
    for cell in cells:
        rehearsals.append(_rehearsed(cell, rank or (), every_block))
        if measured:
            real.append(measure([cell])[0])
    if json_output:
        print(json.dumps([_document(r, real[i : i + 1]) for i, r in enumerate(rehearsals)]))
        return
    _show(rehearsals, real)


def _rehearsed(cell: Cell, ranks: Sequence[int], every_block: bool) -> Rehearsal:
    from harness.planner.rehearsal.rehearse import rehearse as rehearse_cell
    from harness.planner.rehearsal.world import quiet
    from harness.spec.errors import Refused, Unavailable, UsageError

    try:
        with quiet():
            return rehearse_cell(cell, ranks, every_block)
    except (Refused, Unavailable) as reason:
        raise UsageError(f"{cell.name} cannot be rehearsed: {reason}") from None


def _cell(word: str, common: dict[str, object]) -> Cell:
    from pydantic import ValidationError

    from bench.select import split_options, with_options
    from harness.spec.cell import Cell
    from harness.spec.errors import UsageError, first_error
    from harness.strategy.registry import make_strategy

    strategy, options = split_options(word)
    try:
        cell = Cell.model_validate({"strategy": strategy, **common})
    except ValidationError as error:
        raise UsageError(first_error(error)) from None
    make_strategy(cell)
    return cell if options is None else with_options(cell, options)


def _document(rehearsal: Rehearsal, real: Sequence[Sequence[AllocatedMemory]]) -> dict[str, object]:
    return {
        "cell": rehearsal.cell.model_dump(mode="json"),
        "fullest_rank": rehearsal.fullest.rank,
        "peak_bytes": rehearsal.fullest.peak_bytes,
        "ranks": [asdict(rank) for rank in rehearsal.ranks],
        "measured": [asdict(rank) for ranks in real for rank in ranks] if real else None,
    }


def _show(rehearsals: Sequence[Rehearsal], real: Sequence[Sequence[AllocatedMemory]]) -> None:
    from rich.markup import escape

    from bench.cli import terminal

    console = terminal.console()
    console.print(_table(rehearsals, real))
    for rehearsal in rehearsals:
        fullest = rehearsal.fullest
        blocks = ", ".join(map(str, fullest.rehearsed_blocks))
        how = f"extrapolated from {blocks} blocks" if len(fullest.rehearsed_blocks) > 1 else "whole"
        seconds = sum(rank.seconds for rank in rehearsal.ranks)
        late = fullest.backend_buffer_bytes
        more = f"; up to {_size(late)} more if gloo's threads free memory late" if late else ""
        console.print(
            escape(
                f"{rehearsal.cell.name}: fullest in phase {fullest.peak_phase},"
                f" {fullest.peak_block}{more}; model {how}; {terminal.duration(seconds)}"
            )
        )
    for rehearsal, ranks in zip(rehearsals, real, strict=False):
        freed_late = max(rank.largest_peak_bytes - rank.peak_bytes for rank in ranks)
        if freed_late > 0.001 * rehearsal.fullest.peak_bytes:
            console.print(
                escape(
                    f"{rehearsal.cell.name}: measured values are each rank's smallest peak; in"
                    f" other steps, gloo's threads freed up to {_size(freed_late)} late"
                )
            )
    console.print(
        "Memory of tensors as torch's allocator counts it, without fragmentation, the Python"
        " process, the GPU context and kernel workspaces."
    )


def _table(rehearsals: Sequence[Rehearsal], real: Sequence[Sequence[AllocatedMemory]]) -> Table:
    from rich.markup import escape

    from bench.cli import terminal

    title = "memory of a rank's tensors at the peak of a step"
    columns = ["rank", "peak", "parameters", "gradients", "optimizer", "activations", "buffers"]
    columns += ["temporaries", "set-up peak", "between steps"]
    columns += ["measured", "error"] if real else []
    table = terminal.table(title, "strategy", *columns)
    for number, rehearsal in enumerate(rehearsals):
        for rank in rehearsal.ranks:
            split = rank.at_peak
            sizes = [*asdict(split).values(), rank.setup_peak_bytes, rank.kept_bytes]
            measured = [m.peak_bytes for m in (real[number] if real else ()) if m.rank == rank.rank]
            table.add_row(
                escape(rehearsal.cell.label),
                str(rank.rank),
                *(_size(size) for size in (rank.peak_bytes, *sizes)),
                *(_size(size) for size in measured),
                *(f"{rank.peak_bytes / size - 1:+.2%}" for size in measured),
            )
    return table


def _size(size: int) -> str:
    gibibytes = size / 2**30
    return f"{gibibytes:.2f} GiB" if gibibytes >= 1 else f"{size / 2**20:.1f} MiB"
