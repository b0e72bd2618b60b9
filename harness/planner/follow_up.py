"""Cells that would settle what a prediction leaves open: as a matrix, and as files that run without
the suite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import yaml

from bench.matrix import read_matrix
from harness.export import TARGETS, export_files, plan_of, write_files
from harness.planner.cluster.layouts import RECOMPUTE, Layout
from harness.planner.cluster.question import Question
from harness.spec.cell import Cell
from harness.spec.errors import Refused, Unavailable, UsageError
from harness.strategy.base import Strategy
from harness.strategy.registry import make_strategy, strategies, validate, with_defaults
from harness.workloads import make_workload

TRIALS = 5
"""Launches of each cell: enough for an interval, and `until it is answered` adds to them."""
SOURCE = "full"
"""Matrix whose options of each strategy are tried."""


def write_matrix(file: Path, cells: Sequence[Cell], description: str) -> None:
    """A matrix of these cells; raises UsageError where the file is there or cannot be written."""
    axes = []
    for cell in cells:
        fields = cell.model_dump(mode="json", exclude_defaults=True, exclude={"defaults"})
        fields["batch"] = fields.pop("global_batch", cell.global_batch)
        if cell.regime == "weak":
            fields["batch"] //= cell.devices
        axes.append(
            {"strategy": cell.strategy, "workload": cell.workload, "device": cell.device, **fields}
        )
    text = yaml.safe_dump(
        {"description": description, "trials": TRIALS, "cells": axes},
        sort_keys=False,
        allow_unicode=True,
        width=100,
    )
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise UsageError(f"file {str(file)!r} is there already; give another one") from None
    except OSError as error:
        raise UsageError(f"cannot write {str(file)!r}: {error.strerror}") from None


def export_first(ranked: Iterable[tuple[Cell, float]], folder: Path) -> str:
    """Writes the first of some cells, best first, that has an export, each target in a folder of
    its own below `folder`; returns what was written, in a sentence.

    `ranked`: cells with their seconds of a step. Raises UsageError where none has an export.
    """
    fastest: float | None = None
    for cell, seconds in ranked:
        fastest = fastest or seconds
        written = list(_targets(cell))
        if not written:
            continue
        for target, files in written:
            write_files(files, folder / target)
        slower = seconds / fastest - 1
        kept = f", the best that has an export, {slower:.0%} slower than the best"
        targets = ", ".join(target for target, _ in written)
        return f"wrote {cell.label}{kept if slower > 0 else ''} to {folder} for {targets}"
    raise UsageError(
        "none of the layouts has an export: several kinds of model parallelism together run inside"
        " of the suite only"
    )


def _targets(cell: Cell) -> Iterator[tuple[str, dict[str, str]]]:
    """The files of each target that the cell's strategy has."""
    strategy = make_strategy(cell)
    for target in TARGETS:
        if plan_of(strategy, cell, target):
            files, _ = export_files(cell, target)
            yield target, files


def workload_of(model: str) -> str:
    """The workload of the suite that a model of the planner is.

    Raises UsageError for a model that the suite cannot build.
    """
    try:
        return make_workload(model).name
    except UsageError:
        raise UsageError(
            f"model {model!r} is known to the planner by its sizes only; give hf:PATH of its"
            " config.json, or a workload of the suite such as llama-7b, to have its cells written"
        ) from None


def cells_of_layout(question: Question, model: str, layout: Layout) -> list[Cell]:
    """The cells that train with a layout: of the strategies whose ranks and sharding are the
    layout's those that need the fewest packages and, of these, can be exported where any can.

    Empty where no strategy of the suite does.
    """
    if layout.context > 1 or layout.expert > 1 or layout.chunks > 1 or layout.offload:
        return []
    fitting = [
        (cell, strategy)
        for cell, strategy in _of_question(question, workload_of(model), layout)
        if layout.data == 1 or strategy.zero_stage == layout.zero
    ]
    fewest = min((len(strategy.requires) for _, strategy in fitting), default=0)
    plain = [pair for pair in fitting if len(pair[1].requires) == fewest]
    exported = [pair for pair in plain if _has_export(pair[0])]
    chosen = exported or plain
    least = min((len(cell.options) for cell, _ in chosen), default=0)
    return [cell for cell, _ in chosen if len(cell.options) == least]


def cells_of_layouts(
    question: Question, model: str, layouts: Iterable[tuple[Layout, float]]
) -> Iterator[tuple[Cell, float]]:
    """The cells of many layouts, each with the number that its layout came with. Once no strategy
    divides the devices as a layout does, others that divide them alike are passed over."""
    without: set[tuple[int, ...]] = set()
    for layout, value in layouts:
        key = (layout.data, layout.pipeline, layout.tensor, layout.zero)
        if key in without:
            continue
        cells = cells_of_layout(question, model, layout)
        if not any(_has_export(cell) for cell in cells):
            without.add(key)
        yield from ((cell, value) for cell in cells)


def _has_export(cell: Cell) -> bool:
    strategy = make_strategy(cell)
    return any(plan_of(strategy, cell, target) for target in TARGETS)


def _of_question(
    question: Question, workload: str, layout: Layout
) -> Iterator[tuple[Cell, Strategy]]:
    """The cells whose strategy divides the devices as the layout does, and can run."""
    axes = (layout.data, layout.pipeline, layout.tensor)
    for name, options in _known_options():
        fields = strategies()[name].model_fields
        own = {axis: size for axis, size in vars(layout).items() if axis in fields}
        try:
            cell = with_defaults(
                Cell(
                    strategy=name,
                    options=options | own,
                    workload=workload,
                    device="cuda",
                    devices=question.devices,
                    nodes=question.nodes,
                    sequence_length=question.sequence_length,
                    global_batch=question.global_batch,
                    micro_batches=layout.accumulation,
                    recompute=RECOMPUTE[layout.recompute],  # type: ignore[arg-type]
                    precision="bf16",
                    learning_rate=1e-4,
                )
            )
            strategy, ranks = validate(cell, make_workload(workload), here=False)
        except (Refused, Unavailable, UsageError):
            continue
        alike = (ranks.data, ranks.pipeline, ranks.tensor) == axes
        if alike and ranks.devices == layout.devices and ranks.devices_per_process == 1:
            yield cell, strategy


def _known_options() -> list[tuple[str, dict[str, object]]]:
    """Strategies with options that are worth trying: the defaults of each, and what the matrix of
    all strategies has."""
    known: dict[str, tuple[str, dict[str, object]]] = {}
    for name, kind in strategies().items():
        if not any(field.is_required() for field in kind.model_fields.values()):
            known[f"{name} {{}}"] = name, {}
    for axes in read_matrix(SOURCE).cells:
        names, options = axes["strategy"], axes.get("options", {})
        for name in names if isinstance(names, list) else [names]:
            for one in options if isinstance(options, list) else [options]:
                known.setdefault(f"{name} {one}", (name, dict(one)))
    return list(known.values())
