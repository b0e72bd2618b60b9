"""Expands a matrix to cells of a host, with reasons for the cells that are left out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from bench.matrix import (
    Axes,
    Host,
    Matrix,
    Rule,
    Sizes,
    UnsuitableData,
    admit_here,
    parse_bytes,
    parse_changes,
    read_matrix,
)
from bench.select import keep
from harness.cell.cell import Cell, without_folder
from harness.cell.errors import Refused, Unavailable, UsageError, first_error
from harness.record.plan import LeftOut
from harness.run.expected import time_limit_seconds
from harness.seam.peak_memory import CONTEXT_BYTES, peak_bytes, states_by_formula
from harness.seam.registry import make_strategy, with_defaults
from harness.workloads import make_workload
from harness.workloads.catalog import split_name

_COUNTED = (
    "batch",
    "micro_batches",
    "sequence_length",
    "warmup_steps",
    "timed_steps",
    "parity_steps",
)
"""Axes whose value may be a name in the matrix's `numbers`."""
MODEL = "model"
"""Internal axis: the workload that replaces every other workload."""


@dataclass(frozen=True)
class Expanded:
    """Cells to run, and cells that are left out, with status and reason."""

    cells: tuple[Cell, ...]
    left_out: tuple[LeftOut, ...]
    once: frozenset[str] = frozenset()
    """Ids of cells that run once, for parity."""


def expand(
    matrix: Matrix,
    host: Host,
    *,
    name: str = "",
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    changes: Axes | None = None,
    model: str = "",
) -> Expanded:
    """Returns a matrix's cells on a host.

    `only`, `skip`: strategies or patterns (bench/select.py). `model`: replaces all workloads,
    keeping suffixes. Raises UsageError for an unknown axis, value or pattern, or if data rules out
    every cell.
    """
    if model:
        make_workload(model)
    rule = matrix.rule(host)
    asked = (changes or {}) | ({MODEL: model} if model else {})
    timed, checked = _timed_and_checked(matrix, rule, host, asked, name)
    once = checked.keys() - timed.keys()
    cells_of_host = [*timed.values(), *(checked[cell] for cell in checked if cell in once)]
    chosen = keep(cells_of_host, only, skip)
    cells, left_out = [], []
    mistake = ""
    for cell in chosen:
        try:
            if model:
                _require_variant(cell)
            admit_here(cell, host)
            if matrix.only_what_fits:
                _require_fit(peak_bytes(cell) + CONTEXT_BYTES, cell, host)
            elif cell.device == "cuda" and (states := states_by_formula(cell)):
                _require_fit(states.total, cell, host)
            cells.append(_limited(cell, host))
        except Refused as error:
            if isinstance(error, UnsuitableData):
                mistake = mistake or str(error)
            left_out.append(LeftOut(cell, "refused", _with_short_name(cell, error)))
        except Unavailable as error:
            left_out.append(LeftOut(cell, "unavailable", _with_short_name(cell, error)))
    if mistake and not cells:
        raise UsageError(mistake)
    return Expanded(tuple(cells), tuple(left_out), frozenset(once & {cell.id for cell in cells}))


def cells_of(matrix: str, settings: Sequence[str]) -> list[Cell]:
    """Returns a matrix's cells with these settings, including cells that cannot run here."""
    expanded = expand(
        read_matrix(matrix), Host.here(), name=matrix, changes=parse_changes(settings)
    )
    return [*expanded.cells, *(left.cell for left in expanded.left_out)]


def _require_fit(need: float, cell: Cell, host: Host) -> None:
    there = host.memory_bytes / (cell.devices if cell.device == "cpu" else 1)
    if need > there:
        raise Refused(
            f"needs at least {need / 2**30:.1f} GiB per device by its formulas, but a device has"
            f" {there / 2**30:.1f} GiB; shard or offload more, train adapters, or use a smaller"
            " model"
        )


def _with_short_name(cell: Cell, reason: Exception) -> str:
    """Returns the reason, in which a user's file has no folder; a plan may name it in 20 lines."""
    model = cell.workload.partition("+")[0]
    return str(reason).replace(model, without_folder(model))


def _require_variant(cell: Cell) -> None:
    try:
        make_workload(cell.workload)
    except UsageError as error:
        raise Refused(str(error)) from None


def _limited(cell: Cell, host: Host) -> Cell:
    if cell.device != "cuda" or "time_limit_seconds" in cell.model_fields_set:
        return cell
    return cell.model_copy(update={"time_limit_seconds": time_limit_seconds(cell, host.name)})


Cells = dict[str, Cell]


def _timed_and_checked(
    matrix: Matrix, rule: Rule, host: Host, changes: Axes, name: str
) -> tuple[Cells, Cells]:
    """Returns a matrix's cells, and fp32 twins of those without a precision, by id."""
    sizes = rule.over(matrix)
    timed: Cells = {}
    checked: Cells = {}
    places = [(f"cells[{index}]", entry) for index, entry in enumerate(matrix.cells)]
    places += [(f"cells[{index}] of this host", entry) for index, entry in enumerate(rule.cells)]
    for location, entry in places:
        where = f"matrix {name}, {location}"
        for axes in _combinations({**sizes.defaults, "device": host.device, **entry, **changes}):
            cell = _cell(axes, sizes, rule, host, where)
            timed.setdefault(cell.id, cell)
        if rule.parity and not {"precision", "device"} & {*entry, *changes}:
            twin_sizes = rule.parity.over(sizes)
            settled = {
                "device": host.device,
                **rule.parity.defaults,
                "precision": "fp32",
                **changes,
            }
            for axes in _combinations({**sizes.defaults, **entry, **settled}):
                cell = _cell(axes, twin_sizes, rule, host, where)
                checked.setdefault(cell.id, cell)
    return timed, checked


def _combinations(axes: Axes) -> Iterator[Axes]:
    lists = [value if isinstance(value, list) else [value] for value in axes.values()]
    for values in itertools.product(*lists):
        yield dict(zip(axes, values, strict=True))


def _cell(axes: Axes, sizes: Sizes, rule: Rule, host: Host, where: str) -> Cell:
    named_numbers = {
        axis: sizes.numbers[value]
        for axis, value in axes.items()
        if axis in _COUNTED and isinstance(value, str) and value in sizes.numbers
    }
    fields = {**axes, **named_numbers}
    if fields.get("nodes") == "many":
        fields["nodes"] = max(host.nodes, 2) if fields.get("links") else host.nodes
    if fields.get("devices") == "many":
        fields["devices"] = host.many * (
            fields["nodes"] if isinstance(fields.get("nodes"), int) else 1
        )
    batch = fields.pop("batch", 8)
    devices = fields.get("devices", 1)
    named, plus, suffixes = str(fields.get("workload", "main")).partition("+")
    model = fields.pop(MODEL, "")
    fields["workload"] = (model or sizes.workloads.get(named, named)) + plus + suffixes
    if not (isinstance(batch, int) and isinstance(devices, int)):
        raise UsageError(
            f"{where}: batch and devices must be whole numbers, got {batch!r} and {devices!r}"
        )
    fields["global_batch"] = batch * devices if fields.get("regime") == "weak" else batch
    parts = fields.get("micro_batches")
    if parts == "many":
        fields["micro_batches"] = 4 if host.device == "cpu" else max(4, 2 * devices)
    elif parts == "fit":
        del fields["micro_batches"]
    if isinstance(fields.get("memory_limit_bytes"), str):
        fields["memory_limit_bytes"] = parse_bytes(fields["memory_limit_bytes"])
    if "parity_steps" not in fields:
        warmup, timed = fields.get("warmup_steps", 3), fields.get("timed_steps", 10)
        if isinstance(warmup, int) and isinstance(timed, int):
            fields["parity_steps"] = max(1, min(20, warmup + timed))
    try:
        cell = Cell(**fields)
    except ValidationError as error:
        raise UsageError(f"{where}: {first_error(error)}") from None
    if parts == "fit" and rule.micro_batch_tokens:
        cell = cell.model_copy(update={"micro_batches": _fewest(cell, rule.micro_batch_tokens)})
    base = make_workload(split_name(cell.workload)[0])
    if base.kind == "image" and cell.data == "stdlib":
        cell = cell.model_copy(update={"data": "images"})
    if model and 0 < base.max_tokens < cell.sequence_length:
        cell = cell.model_copy(update={"sequence_length": base.max_tokens})
    return with_defaults(cell)


def _fewest(cell: Cell, tokens: int) -> int:
    """Returns the minimum number of micro-batches with at most this many tokens per data-parallel
    rank."""
    try:
        samples = max(1, cell.global_batch // make_strategy(cell).layout(cell.devices).data)
    except Refused:
        return 1  # the cell is left out anyway
    return next(
        n
        for n in range(1, samples + 1)
        if samples % n == 0 and (samples // n * cell.sequence_length <= tokens or n == samples)
    )
