"""A matrix file -> cells, with the reason for every one left out.

description: one sentence trials: 10                     # launches of each cell; 10 unless said
otherwise workloads: {main: llama-mini}  # names that cells may use as their workload, also with
suffixes: main+lora numbers: {images: 32}          # names that cells may use as a number, such as
their batch defaults: {batch: 8}           # axes that hold where a cell says nothing hosts:
# the first rule that fits the host adds to the above
  - device: cuda
    memory_at_least: 60GiB
    workloads: {main: llama-1b}
    defaults: {batch: 32}
    trials: 2                  # in place of the matrix's
    micro_batch_tokens: 4096   # what `micro_batches: fit` means here
    parity: {workloads: {main: llama-mini}, defaults: {batch: 8}}
cells:                         # a list as a value stands for one cell each; several lists for all
combinations
  - {strategy: ddp, devices: [1, many], options: [{}, {static_graph: true}]}

`devices: many` is 2 on a CPU; on GPUs all of them, at most 8, as a power of two; so many on each
node of the cell. `nodes: many` is all nodes of the run; of cells with `links`, whose nodes are
emulated, at least 2. `micro_batches: many` is 4 on a CPU; on GPUs two for each device, at least 4:
what keeps a pipeline of that many stages busy. `micro_batches: fit` is 1, but on a host whose rule
has `micro_batch_tokens` the fewest that leave a data-parallel rank at most so many tokens at a
time. `parity` adds to each cell that names no precision its twin in fp32, which is launched once
and held to the tightest tolerance: what is timed in bf16 may deviate by bf16's rounding, which
would hide a small mistake. Its workloads, numbers and defaults go before all others, so that a twin
is small.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bench.host import Host, admit_here
from harness.record.plan import LeftOut
from harness.run.expected import time_limit_seconds
from harness.spec.cell import Cell
from harness.spec.errors import Refused, Unavailable, UsageError, first_error
from harness.strategy.registry import make_strategy, with_defaults
from harness.workloads import make_workload

HOME = Path(__file__).parent / "matrices"
DEFAULT_TRIALS = 10
"""Launches that show a difference of 3 % where launches spread by 1.1 %
(tests/unit/test_stats.py)."""
_COUNTED = (
    "batch",
    "micro_batches",
    "sequence_length",
    "warmup_steps",
    "timed_steps",
    "parity_steps",
)
"""Axes whose value may be the name of a number."""
AXES = (*(name for name in Cell.model_fields if name not in ("global_batch", "defaults")), "batch")


class Sizes(BaseModel):
    """What names mean, and which axes hold where a cell says nothing."""

    model_config = ConfigDict(extra="forbid")
    workloads: dict[str, str] = Field(default_factory=dict)
    numbers: dict[str, int] = Field(default_factory=dict)
    defaults: dict[str, Any] = Field(default_factory=dict)

    def over(self, other: Sizes) -> Sizes:
        """Both; where they say two things, this one's."""
        return Sizes(
            workloads={**other.workloads, **self.workloads},
            numbers={**other.numbers, **self.numbers},
            defaults={**other.defaults, **self.defaults},
        )


class Rule(Sizes):
    """What a kind of host adds to a matrix."""

    device: Literal["cpu", "cuda"] | None = None
    memory_at_least: str = "0B"
    trials: int | None = Field(default=None, ge=1)
    micro_batch_tokens: int | None = Field(default=None, ge=1)
    parity: Sizes | None = None

    def fits(self, host: Host) -> bool:
        return self.device in (None, host.device) and host.memory_bytes >= parse_bytes(
            self.memory_at_least
        )


class Matrix(Sizes):
    """A matrix file as it is written."""

    description: str = ""
    trials: int = Field(default=DEFAULT_TRIALS, ge=1)
    hosts: list[Rule] = Field(default_factory=list)
    cells: list[dict[str, Any]] = Field(min_length=1)

    def rule(self, host: Host) -> Rule:
        """The first rule that fits a host; an empty one where none does."""
        return next((rule for rule in self.hosts if rule.fits(host)), Rule())

    def trials_on(self, host: Host) -> int:
        """Launches of each cell on a host."""
        return self.rule(host).trials or self.trials


AnyMatrix = TypeVar("AnyMatrix", bound=Matrix)

_UNITS = {
    "B": 1,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(text: str | int) -> int:
    """`60GiB`, `500MB` or a number of bytes; raises UsageError for anything else."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgtKMGT]?i?[bB])?\s*", str(text))
    if not match:
        raise UsageError(f"{text!r} is not an amount of memory; write it like 2GiB or 500MB")
    return int(float(match[1]) * _UNITS[(match[2] or "B").upper()])


def matrix_names() -> list[str]:
    return sorted(path.stem for path in HOME.glob("*.yaml"))


def read_matrix(name: str) -> Matrix:
    """The matrix of this name, or in this file; raises UsageError with the file and the key."""
    return read_as(name, Matrix)


def read_as(name: str, kind: type[AnyMatrix]) -> AnyMatrix:
    """The same for a kind of matrix that has more keys."""
    path = HOME / f"{name}.yaml"
    if not path.is_file():
        path = Path(name)
    if not path.is_file():
        raise UsageError(
            f"unknown matrix {name!r}; known are {', '.join(matrix_names())}, or give the path of a"
            " YAML file"
        )
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(
            f"matrix {path}: not readable as YAML: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(content, dict):
        raise UsageError(f"matrix {path}: must be a mapping with a key 'cells'")
    _known_keys(content, kind.model_fields, f"matrix {path}")
    try:
        matrix = kind(**content)
    except ValidationError as error:
        raise UsageError(f"matrix {path}, {first_error(error)}") from None
    places: list[tuple[str, Sizes | None]] = [("", matrix)]
    for index, rule in enumerate(matrix.hosts):
        places += [(f"hosts[{index}].", rule), (f"hosts[{index}].parity.", rule.parity)]
    for where, axes in [(f"{place}defaults", sizes.defaults) for place, sizes in places if sizes]:
        _known_keys(axes, AXES, f"matrix {path}, {where}")
    for index, entry in enumerate(matrix.cells):
        _known_keys(entry, AXES, f"matrix {path}, cells[{index}]")
    return matrix


def _known_keys(given: Iterable[str], known: Iterable[str], where: str) -> None:
    names = list(known)
    for key in given:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
            raise UsageError(f"{where}: unknown key {key!r}; {hint}")


@dataclass(frozen=True)
class Expanded:
    """Cells to run, and cells left out with status and reason."""

    cells: tuple[Cell, ...]
    left_out: tuple[LeftOut, ...]
    once: frozenset[str] = frozenset()
    """Ids of the cells that are launched once, for parity."""


def expand(
    matrix: Matrix,
    host: Host,
    *,
    name: str = "",
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
) -> Expanded:
    """All cells of a matrix on a host. `only` and `skip`: strategy names, or patterns over the
    cell's words.

    Raises UsageError for an axis, value or pattern that means nothing.
    """
    rule = matrix.rule(host)
    timed, checked = _timed_and_checked(matrix, rule, host, changes or {}, name)
    once = checked.keys() - timed.keys()
    chosen = _choose(
        [*timed.values(), *(checked[cell] for cell in checked if cell in once)], only, skip
    )
    cells, left_out = [], []
    for cell in chosen:
        try:
            admit_here(cell, host)
            cells.append(_limited(cell, host))
        except Refused as no:
            left_out.append(LeftOut(cell, "refused", str(no)))
        except Unavailable as no:
            left_out.append(LeftOut(cell, "unavailable", str(no)))
    return Expanded(tuple(cells), tuple(left_out), frozenset(once & {cell.id for cell in cells}))


def _limited(cell: Cell, host: Host) -> Cell:
    """A GPU cell that names no time limit gets one by what it is expected to take."""
    if cell.device != "cuda" or "time_limit_seconds" in cell.model_fields_set:
        return cell
    return cell.model_copy(update={"time_limit_seconds": time_limit_seconds(cell, host.name)})


Cells = dict[str, Cell]
"""By id, in the matrix's order."""


def _timed_and_checked(
    matrix: Matrix, rule: Rule, host: Host, changes: Mapping[str, Any], name: str
) -> tuple[Cells, Cells]:
    """The cells of a matrix, and the twins in fp32 of those that name no precision."""
    sizes = rule.over(matrix)
    timed: Cells = {}
    checked: Cells = {}
    for index, entry in enumerate(matrix.cells):
        where = f"matrix {name}, cells[{index}]"
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


def _combinations(axes: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    lists = [value if isinstance(value, list) else [value] for value in axes.values()]
    for values in itertools.product(*lists):
        yield dict(zip(axes, values, strict=True))


def _cell(axes: Mapping[str, Any], sizes: Sizes, rule: Rule, host: Host, where: str) -> Cell:
    """The cell of these axes; raises UsageError where one of them means nothing."""
    named_numbers = {
        axis: sizes.numbers[value]
        for axis, value in axes.items()
        if axis in _COUNTED and value in sizes.numbers
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
    fields["workload"] = sizes.workloads.get(named, named) + plus + suffixes
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
    if make_workload(cell.workload).kind == "image" and cell.data == "stdlib":
        cell = cell.model_copy(update={"data": "images"})
    return with_defaults(cell)


def _fewest(cell: Cell, tokens: int) -> int:
    """The smallest number of micro-batches of at most so many tokens for a data-parallel rank."""
    try:
        samples = max(1, cell.global_batch // make_strategy(cell).layout(cell.devices).data)
    except Refused:
        return 1  # the cell is left out, whatever its micro-batches
    return next(
        n
        for n in range(1, samples + 1)
        if samples % n == 0 and (samples // n * cell.sequence_length <= tokens or n == samples)
    )


def matches(cell: Cell, pattern: str) -> bool:
    """Whether the pattern is the cell's strategy or id, or fits its label or name."""
    return (
        cell.strategy == pattern
        or fnmatch.fnmatchcase(cell.label, pattern)
        or fnmatch.fnmatchcase(cell.name, pattern)
        or cell.id == pattern
    )


def _choose(cells: list[Cell], only: Sequence[str], skip: Sequence[str]) -> list[Cell]:
    for option, patterns in (("--only", only), ("--skip", skip)):
        for pattern in patterns:
            if not any(matches(cell, pattern) for cell in cells):
                names = ", ".join(sorted({cell.strategy for cell in cells}))
                raise UsageError(
                    f"{option} {pattern!r} matches no cell of the matrix; its strategies are:"
                    f" {names}"
                )
    kept = [c for c in cells if not only or any(matches(c, p) for p in only)]
    kept = [c for c in kept if not any(matches(c, p) for p in skip)]
    if not kept:
        raise UsageError("--only and --skip leave no cell of the matrix")
    return kept


def parse_changes(settings: Sequence[str]) -> dict[str, Any]:
    """`--set axis=value` options; values are read as YAML, so `devices=[1,2]` is a list."""
    changes: dict[str, Any] = {}
    for setting in settings:
        axis, sign, value = setting.partition("=")
        if not sign:
            raise UsageError(
                f"--set {setting!r}: write it as axis=value, for example --set batch=16"
            )
        _known_keys([axis], AXES, f"--set {setting!r}")
        try:
            changes[axis] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UsageError(f"--set {setting!r}: the value is not readable as YAML") from None
    return changes
