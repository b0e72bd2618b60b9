"""A matrix file -> cells, with the reason for every one left out.

description: one sentence
trials: 10                     # launches of each cell; 10 unless said otherwise
workloads: {main: llama-mini}  # names that cells may use as their workload, also with suffixes: main+lora
defaults: {batch: 8}           # axes that hold where a cell says nothing
hosts:                         # the first rule that fits the host adds to the above
  - {device: cuda, memory_at_least: 60GiB, workloads: {main: llama-1b}, defaults: {batch: 32}}
cells:                         # a list as a value stands for one cell each; several lists for all combinations
  - {strategy: ddp, devices: [1, many], options: [{}, {static_graph: true}]}

`devices: many` is 2 on a CPU; on GPUs all of them, at most 8, as a power of two; so many on each node of the cell.
`nodes: many` is all nodes of the run; of cells with `links`, whose nodes are emulated, at least 2.
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

from harness.cell import Cell
from harness.errors import Mistake, Refused, Unavailable, complaint
from harness.plan import LeftOut
from harness.registry import admit
from harness.workloads import make_workload, prepare_data

HOME = Path(__file__).parent / "matrices"
DEFAULT_TRIALS = 10
"""Launches that show a difference of 3 % where launches spread by 1.1 % (tests/unit/test_stats.py)."""
AXES = (*(name for name in Cell.model_fields if name != "global_batch"), "batch")


@dataclass(frozen=True)
class Host:
    """What decides a matrix's sizes on this machine."""

    device: str
    num_devices: int
    """GPUs, or CPU cores (more ranks than cores are allowed on a CPU and labelled)."""
    memory_bytes: int
    """Of one GPU, or of the host."""
    nodes: int = 1
    """Nodes that the run has, this host among them."""

    @property
    def many(self) -> int:
        """What `devices: many` means here."""
        return 2 if self.device == "cpu" else next(n for n in (8, 4, 2, 1) if n <= self.num_devices)

    @classmethod
    def here(cls, nodes: int = 1) -> Host:
        import psutil

        from harness.cores import allowed_cores
        from harness.environment import device_type, gpus

        if device_type() == "cuda":
            found = gpus()
            return cls("cuda", len(found), found[0][1], nodes)
        return cls("cpu", len(allowed_cores()), psutil.virtual_memory().total, nodes)


class Rule(BaseModel):
    """What a kind of host adds to a matrix."""

    model_config = ConfigDict(extra="forbid")
    device: Literal["cpu", "cuda"] | None = None
    memory_at_least: str = "0B"
    workloads: dict[str, str] = Field(default_factory=dict)
    defaults: dict[str, Any] = Field(default_factory=dict)

    def fits(self, host: Host) -> bool:
        return self.device in (None, host.device) and host.memory_bytes >= parse_bytes(self.memory_at_least)


class Matrix(BaseModel):
    """A matrix file as it is written."""

    model_config = ConfigDict(extra="forbid")
    description: str = ""
    trials: int = Field(default=DEFAULT_TRIALS, ge=1)
    workloads: dict[str, str] = Field(default_factory=dict)
    defaults: dict[str, Any] = Field(default_factory=dict)
    hosts: list[Rule] = Field(default_factory=list)
    cells: list[dict[str, Any]] = Field(min_length=1)


AnyMatrix = TypeVar("AnyMatrix", bound=Matrix)

_UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str | int) -> int:
    """`60GiB`, `500MB` or a number of bytes; raises Mistake for anything else."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgtKMGT]?i?[bB])?\s*", str(text))
    if not match:
        raise Mistake(f"{text!r} is not an amount of memory; write it like 2GiB or 500MB")
    return int(float(match[1]) * _UNITS[(match[2] or "B").upper()])


def matrix_names() -> list[str]:
    return sorted(path.stem for path in HOME.glob("*.yaml"))


def read_matrix(name: str) -> Matrix:
    """The matrix of this name, or in this file; raises Mistake with the file and the key."""
    return read_as(name, Matrix)


def read_as(name: str, kind: type[AnyMatrix]) -> AnyMatrix:
    """The same for a kind of matrix that has more keys."""
    path = HOME / f"{name}.yaml"
    if not path.is_file():
        path = Path(name)
    if not path.is_file():
        raise Mistake(f"unknown matrix {name!r}; known are {', '.join(matrix_names())}, or give the path of a YAML file")
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Mistake(f"matrix {path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise Mistake(f"matrix {path}: must be a mapping with a key 'cells'")
    _known_keys(content, kind.model_fields, f"matrix {path}")
    try:
        matrix = kind(**content)
    except ValidationError as error:
        raise Mistake(f"matrix {path}, {complaint(error)}") from None
    for where, axes in [("defaults", matrix.defaults), *((f"hosts[{i}].defaults", r.defaults) for i, r in enumerate(matrix.hosts))]:
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
            raise Mistake(f"{where}: unknown key {key!r}; {hint}")


@dataclass(frozen=True)
class Expanded:
    """Cells to run, and cells left out with status and reason."""

    cells: tuple[Cell, ...]
    left_out: tuple[LeftOut, ...]


def expand(
    matrix: Matrix,
    host: Host,
    *,
    name: str = "",
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
) -> Expanded:
    """All cells of a matrix on a host. `only` and `skip`: strategy names, or patterns over the cell's words.

    Raises Mistake for an axis, value or pattern that means nothing.
    """
    rule = next((r for r in matrix.hosts if r.fits(host)), Rule())
    workloads = {**matrix.workloads, **rule.workloads}
    defaults = {**matrix.defaults, **rule.defaults, "device": host.device}
    found: dict[str, Cell] = {}
    for index, entry in enumerate(matrix.cells):
        for axes in _combinations({**defaults, **entry, **(changes or {})}):
            if axes.get("nodes") == "many":
                axes["nodes"] = max(host.nodes, 2) if axes.get("links") else host.nodes
            if axes.get("devices") == "many":
                axes["devices"] = host.many * (axes["nodes"] if isinstance(axes.get("nodes"), int) else 1)
            cell = _cell(axes, workloads, f"matrix {name}, cells[{index}]")
            found.setdefault(cell.id, cell)
    chosen = _choose(list(found.values()), only, skip)
    cells, left_out = [], []
    for cell in chosen:
        try:
            _admit_here(cell, host)
            cells.append(cell)
        except Refused as no:
            left_out.append(LeftOut(cell, "refused", str(no)))
        except Unavailable as no:
            left_out.append(LeftOut(cell, "unavailable", str(no)))
    return Expanded(tuple(cells), tuple(left_out))


def _combinations(axes: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    lists = [value if isinstance(value, list) else [value] for value in axes.values()]
    for values in itertools.product(*lists):
        yield dict(zip(axes, values, strict=True))


def _cell(axes: Mapping[str, Any], workloads: Mapping[str, str], where: str) -> Cell:
    fields = dict(axes)
    batch = fields.pop("batch", 8)
    devices = fields.get("devices", 1)
    named, plus, suffixes = str(fields.get("workload", "main")).partition("+")
    fields["workload"] = workloads.get(named, named) + plus + suffixes
    if not (isinstance(batch, int) and isinstance(devices, int)):
        raise Mistake(f"{where}: batch and devices must be whole numbers, got {batch!r} and {devices!r}")
    fields["global_batch"] = batch * devices if fields.get("regime") == "weak" else batch
    if isinstance(fields.get("memory_limit_bytes"), str):
        fields["memory_limit_bytes"] = parse_bytes(fields["memory_limit_bytes"])
    if "parity_steps" not in fields:
        warmup, timed = fields.get("warmup_steps", 3), fields.get("timed_steps", 10)
        if isinstance(warmup, int) and isinstance(timed, int):
            fields["parity_steps"] = max(1, min(20, warmup + timed))
    try:
        cell = Cell(**fields)
    except ValidationError as error:
        raise Mistake(f"{where}: {complaint(error)}") from None
    if make_workload(cell.workload).kind == "image" and cell.data == "stdlib":
        cell = cell.model_copy(update={"data": "images"})
    return cell


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
                raise Mistake(f"{option} {pattern!r} matches no cell of the matrix; its strategies are: {names}")
    kept = [c for c in cells if not only or any(matches(c, p) for p in only)]
    kept = [c for c in kept if not any(matches(c, p) for p in skip)]
    if not kept:
        raise Mistake("--only and --skip leave no cell of the matrix")
    return kept


def _admit_here(cell: Cell, host: Host) -> None:
    """Raises Mistake, Refused or Unavailable where the cell cannot run on this host."""
    workload = make_workload(cell.workload)
    admit(cell, workload)
    if cell.links:
        from harness.links.emulated import lacking

        if why := lacking():
            raise Unavailable(why)
    if cell.nodes > host.nodes and not cell.links:
        raise Unavailable(f"needs {cell.nodes} nodes, this run has {host.nodes}; python -m bench submit --nodes {cell.nodes} asks for them")
    if cell.device == "cuda":
        if host.device != "cuda":
            raise Unavailable("no GPU that this torch can use; device: cpu runs here")
        if cell.links and cell.devices > host.num_devices:
            raise Unavailable(f"needs {cell.devices} GPUs for its emulated nodes, this host has {host.num_devices}")
        if cell.devices // cell.nodes > host.num_devices:
            raise Unavailable(f"needs {cell.devices // cell.nodes} GPUs on a node, this one has {host.num_devices}")
    prepare_data(cell.data, workload, cell.sequence_length)


def parse_changes(settings: Sequence[str]) -> dict[str, Any]:
    """`--set axis=value` options; values are read as YAML, so `devices=[1,2]` is a list."""
    changes: dict[str, Any] = {}
    for setting in settings:
        axis, sign, value = setting.partition("=")
        if not sign:
            raise Mistake(f"--set {setting!r}: write it as axis=value, for example --set batch=16")
        _known_keys([axis], AXES, f"--set {setting!r}")
        try:
            changes[axis] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise Mistake(f"--set {setting!r}: the value is not readable as YAML") from None
    return changes
