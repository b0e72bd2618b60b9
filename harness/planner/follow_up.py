"""Turns predicted layouts into cells to measure, export or rehearse."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml

from harness.cell.cell import FILLED_IN, Cell
from harness.cell.errors import Refused, Unavailable, UsageError, plural
from harness.export import (
    TARGETS,
    export_files,
    plan_of,
    require_new_or_empty,
    why_not,
    write_files,
)
from harness.planner.cluster.cluster_plan import ClusterCandidate
from harness.planner.cluster.question import ClusterQuestion, PlannedLayout
from harness.planner.cluster.recipe import RECOMPUTE, SUITE_CELLS, SUITE_RECOMPUTE
from harness.seam.base import Strategy
from harness.seam.registry import make_strategy, strategies, validate, with_defaults
from harness.workloads import make_workload

if TYPE_CHECKING:
    from harness.planner.rehearsal.rehearse import RankMemory

TRIALS = 5
"""Trials per cell, enough for an interval."""
StrategyOptions: TypeAlias = tuple[str, dict[str, Any]]
"""Name of a strategy, and options beyond its defaults."""


@dataclass(frozen=True)
class FollowUp:
    """Files to write after an answer."""

    message: str
    """Sentence that says what was written."""
    check: Callable[[], None]
    """Raises UsageError if something is in the way."""
    write: Callable[[], None]
    """Writes; raises UsageError if something is in the way or cannot be written."""


def matrix_file(file: Path, cells: Sequence[Cell], description: str) -> FollowUp:
    """Returns a matrix of these cells, best first; raises UsageError without cells."""
    if not cells:
        raise UsageError(
            "no strategy of the suite supports any of the best layouts, so there is nothing to"
            " measure; try fewer devices or another goal"
        )
    axes = []
    for cell in cells:
        fields = cell.model_dump(mode="json", exclude_defaults=True, exclude={*FILLED_IN})
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
    exists = UsageError(f"file {str(file)!r} exists already; name another one")

    def check() -> None:
        if os.path.lexists(file):
            raise exists

    def write() -> None:
        try:
            with file.open("x", encoding="utf-8") as opened:
                opened.write(text)
        except FileExistsError:
            raise exists from None
        except OSError as error:
            raise UsageError(f"cannot write {str(file)!r}: {error.strerror}") from None

    return FollowUp(f"wrote {plural(len(cells), 'cell')} to {file}", check, write)


def first_export(ranked: Iterable[tuple[Cell, float]], folder: Path) -> FollowUp:
    """Returns the export of the best cell that has one, in a folder per target. `ranked`: cells
    with step times in seconds, best first. Raises UsageError if no cell has an export."""
    best: tuple[Cell, float] | None = None
    for cell, seconds in ranked:
        best = best or (cell, seconds)
        exported = dict(_targets(cell))
        if not exported:
            continue
        slower = seconds / best[1] - 1
        compared = f", the best exportable layout, {slower:.0%} slower than the best"
        message = (
            f"wrote {cell.label}{compared if slower > 0 else ''} to {folder} for"
            f" {', '.join(exported)}"
        )
        return FollowUp(
            message, partial(_check_folders, folder, exported), partial(_write, folder, exported)
        )
    if best is None:
        raise UsageError(
            "no strategy of the suite supports any of the best layouts, so there is nothing to"
            " export; try fewer devices or another goal"
        )
    raise UsageError(
        f"none of the layouts can be exported; the best is {best[0].label}: {why_not(best[0])}"
    )


def _check_folders(folder: Path, exported: Iterable[str]) -> None:
    for target in exported:
        require_new_or_empty(folder / target)


def _write(folder: Path, exported: Mapping[str, dict[str, str]]) -> None:
    for target, files in exported.items():
        write_files(files, folder / target)


def _targets(cell: Cell) -> Iterator[tuple[str, dict[str, str]]]:
    strategy = make_strategy(cell)
    for target in TARGETS:
        if plan_of(strategy, cell, target):
            files, _ = export_files(cell, target)
            yield target, files


def workload_of(model: str) -> str:
    """Returns the suite's workload for a model. Raises UsageError if there is none."""
    try:
        return make_workload(model).name
    except UsageError:
        raise UsageError(
            f"the planner knows only the sizes of model {model!r}; to have its cells written, give"
            " hf:PATH of its config.json, or a workload of the suite such as llama-7b"
        ) from None


def cells_of_layout(
    question: ClusterQuestion, model: str, layout: PlannedLayout, tried: Sequence[StrategyOptions]
) -> list[Cell]:
    """Returns cells that train with a layout.

    Prefers few packages, then an export. `tried`: options beyond the defaults.
    """
    if layout.context > 1 or layout.expert > 1 or layout.chunks > 1 or layout.offload:
        return []
    if question.precision not in SUITE_CELLS or RECOMPUTE[layout.recompute] not in SUITE_RECOMPUTE:
        return []
    fitting = [
        (cell, strategy)
        for cell, strategy in _matching(question, workload_of(model), layout, tried)
        if layout.data == 1
        or (
            strategy.zero_stage == layout.zero
            and (
                layout.accumulation == 1
                or (strategy.zero_stage >= 2 and strategy.accumulates_whole_gradients)
                == layout.whole_gradients
            )
        )
    ]
    if _gathers_bf16(question, layout):
        fitting = [pair for pair in fitting if pair[0].options.get("mixed_precision")] or fitting
    fewest = min((len(strategy.requires) for _, strategy in fitting), default=0)
    plain = [pair for pair in fitting if len(pair[1].requires) == fewest]
    exported = [pair for pair in plain if _has_export(pair[0])]
    chosen = exported or plain
    least = min((len(cell.options) for cell, _ in chosen), default=0)
    return [cell for cell, _ in chosen if len(cell.options) == least]


def rehearsed(
    question: ClusterQuestion,
    model: str,
    candidate: ClusterCandidate,
    tried: Sequence[StrategyOptions],
) -> ClusterCandidate:
    """Returns the candidate with the memory that its first cell's code allocates on fake tensors.

    The model must be a workload of the suite or `hf:PATH`.
    """
    cells = cells_of_layout(question, model, candidate.layout, tried)
    if not cells:
        return dataclasses.replace(candidate, rehearsal="no strategy of the suite trains with it")
    try:
        rank = fullest_rank(cells[0], every_rank=candidate.layout.pipeline > 1)
    except (Refused, Unavailable, UsageError) as reason:
        return dataclasses.replace(candidate, rehearsal=str(reason))
    peak = float(rank.peak_bytes)
    return dataclasses.replace(candidate, rehearsed_bytes=peak, rehearsal=cells[0].label)


def fullest_rank(cell: Cell, every_rank: bool = False) -> RankMemory:
    """Rehearses a cell's fullest or first rank; raises as `rehearse` does."""
    from harness.planner.rehearsal.rehearse import rehearse
    from harness.planner.rehearsal.world import quiet

    on_cpu = cell.model_copy(update={"device": "cpu", "nodes": 1})
    with quiet():
        return rehearse(on_cpu, () if every_rank else (0,)).fullest


def _gathers_bf16(question: ClusterQuestion, layout: PlannedLayout) -> bool:
    """Returns whether a layout keeps fp32 shards and gathers bf16 parameters. Under autocast, FSDP
    gathers fp32 parameters, and backward keeps a bf16 copy of all."""
    return question.precision == "bf16" and layout.data > 1 and layout.zero >= 2


def cells_of_layouts(
    question: ClusterQuestion,
    model: str,
    layouts: Iterable[tuple[PlannedLayout, float]],
    tried: Sequence[StrategyOptions],
) -> Iterator[tuple[Cell, float]]:
    """Yields cells of many layouts, each with its layout's value. If a layout has no exportable
    strategy, later layouts that differ only in micro-batches are skipped."""
    without: set[PlannedLayout] = set()
    for layout, value in layouts:
        key = dataclasses.replace(layout, micro_batch=1, accumulation=1)
        if key in without:
            continue
        cells = cells_of_layout(question, model, layout, tried)
        if not any(_has_export(cell) for cell in cells):
            without.add(key)
        yield from ((cell, value) for cell in cells)


def _has_export(cell: Cell) -> bool:
    strategy = make_strategy(cell)
    return any(plan_of(strategy, cell, target) for target in TARGETS)


def _matching(
    question: ClusterQuestion,
    workload: str,
    layout: PlannedLayout,
    tried: Sequence[StrategyOptions],
) -> Iterator[tuple[Cell, Strategy]]:
    axes = (layout.data, layout.pipeline, layout.tensor)
    variant, precision = SUITE_CELLS[question.precision]
    workload += variant
    reduced = layout.zero >= 2 and layout.accumulation > 1 and not layout.whole_gradients
    for name, options in _choices(tried):
        fields = strategies()[name].model_fields
        sizes = {axis: size for axis, size in vars(layout).items() if axis in fields}
        further = {"no_sync": False} if reduced and "no_sync" in fields else {}
        if _gathers_bf16(question, layout) and "mixed_precision" in fields:
            further["mixed_precision"] = True
        try:
            cell = with_defaults(
                Cell(
                    strategy=name,
                    options=options | sizes | further,
                    workload=workload,
                    device="cuda",
                    devices=question.devices,
                    nodes=question.nodes,
                    sequence_length=question.sequence_length,
                    global_batch=question.global_batch,
                    micro_batches=layout.accumulation,
                    recompute=RECOMPUTE[layout.recompute],  # type: ignore[arg-type]
                    precision=precision,  # type: ignore[arg-type]
                    learning_rate=1e-4,
                )
            )
            strategy, ranks = validate(cell, make_workload(workload), here=False)
        except (Refused, Unavailable, UsageError):
            continue
        same_axes = (ranks.data, ranks.pipeline, ranks.tensor) == axes
        if same_axes and ranks.devices == layout.devices and ranks.devices_per_process == 1:
            yield cell, strategy


def _choices(tried: Sequence[StrategyOptions]) -> list[StrategyOptions]:
    choices: dict[str, StrategyOptions] = {}
    for name, kind in strategies().items():
        if not any(field.is_required() for field in kind.model_fields.values()):
            choices[f"{name} {{}}"] = name, {}
    for name, options in tried:
        choices.setdefault(f"{name} {options}", (name, options))
    return list(choices.values())
