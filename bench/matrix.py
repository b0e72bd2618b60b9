"""Matrix files, as written in YAML; bench/expand.py expands them to cells.

    description: one sentence
    trials: 10                     # trials of each cell; default 10
    timed_seconds: 2               # on CPUs: seconds of timed steps in a trial, interleaved with a
                                   # control; default 2; 0 for no control
    time_budget_minutes: 30        # no trial starts after that, except those missing from the first
                                   # two rounds; default: the planned time plus a quarter
    long_training: false           # leaves out 200 steps of a nano model per strategy
    workloads: {main: llama-mini}  # names that cells may use as their workload: main, main+lora
    numbers: {images: 32}          # names that cells may use as a number, such as their batch
    only_what_fits: true           # leaves out cells that exceed a device's memory by formula
    rehearse: true                 # rehearses rank 0 of each cell, for the report's chart of states
    defaults: {batch: 8}           # axes of cells that do not set them
    hosts:                         # the first rule that fits the host extends the above
      - device: cuda
        memory_at_least: 60GiB
        devices_at_most: 1         # GPUs, or CPU cores
        workloads: {main: llama-1b}
        defaults: {batch: 32}
        trials: 2                  # in place of the matrix's
        micro_batch_tokens: 4096   # what `micro_batches: fit` means here
        cells: [{strategy: fsdp2, compile: block}]  # in addition to the matrix's
        parity: {workloads: {main: llama-mini}, defaults: {batch: 8}}
    cells:                         # lists as values give one cell per combination
      - {strategy: ddp, devices: [1, many], options: [{}, {static_graph: true}]}

Words that stand for a number:

- `devices: many`: 2 on a CPU; on GPUs all of them, at most 8, as a power of two, per node
- `nodes: many`: all nodes of the run; at least 2 for cells with `links`, whose nodes are emulated
- `micro_batches: many`: 4 on a CPU; on GPUs two per device, at least 4, to keep a pipeline busy
- `micro_batches: fit`: 1; if the host's rule has `micro_batch_tokens`, the minimum with
  at most that many tokens at a time per data-parallel rank

`parity` adds an fp32 twin to each cell that names no precision. It runs once, under the tightest
tolerance, since bf16's rounding would hide small mistakes. Its workloads, numbers and defaults
override all others, to keep twins small.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from harness.cell.cell import FILLED_IN, Cell, DeviceType
from harness.cell.errors import Refused, Unavailable, UsageError, first_error
from harness.cell.yaml_text import parse_yaml, require_keys
from harness.seam.checkpoints import saving_cell
from harness.seam.registry import make_strategy, validate
from harness.workloads import make_workload, prepare_data
from harness.workloads.counts import model_facts

HOME = Path(__file__).parent / "matrices"
DEFAULT_TRIALS = 10
"""Number of trials of a cell. Ten resolve differences of 3% if trials spread by 1.1%
(tests/unit/test_stats.py)."""
DEFAULT_TIMED_SECONDS = 2.0
"""Timed seconds of a trial: long enough to average over short slow spells, and about as long as
starting a trial."""
_NO_AXES = ("global_batch", *FILLED_IN)
"""Cell fields that a matrix cannot set."""
AXES = (*(name for name in Cell.model_fields if name not in _NO_AXES), "batch")
_AXES_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "properties": {axis: {} for axis in AXES}
    | {
        axis: {"description": " ".join(field.description.split())}
        for axis, field in Cell.model_fields.items()
        if axis in AXES and field.description
    },
}
Axes: TypeAlias = Annotated[dict[str, Any], WithJsonSchema(_AXES_SCHEMA)]
"""Axis values from YAML; they may be names or lists, so the schema checks only axes."""


class Sizes(BaseModel):
    """Workloads and numbers by name, and default axes."""

    model_config = ConfigDict(extra="forbid")
    workloads: dict[str, str] = Field(default_factory=dict)
    numbers: dict[str, int] = Field(default_factory=dict)
    defaults: Axes = Field(default_factory=dict)

    def over(self, other: Sizes) -> Sizes:
        """Merges with `other`; entries of `self` win."""
        return Sizes(
            workloads={**other.workloads, **self.workloads},
            numbers={**other.numbers, **self.numbers},
            defaults={**other.defaults, **self.defaults},
        )


class Rule(Sizes):
    """Additions for a kind of host."""

    device: DeviceType | None = None
    memory_at_least: str = "0B"
    devices_at_most: int | None = Field(default=None, ge=1)
    trials: int | None = Field(default=None, ge=1)
    micro_batch_tokens: int | None = Field(default=None, ge=1)
    cells: list[Axes] = Field(default_factory=list)
    parity: Sizes | None = None

    def fits(self, host: Host) -> bool:
        few_enough = self.devices_at_most is None or host.num_devices <= self.devices_at_most
        large_enough = host.memory_bytes >= parse_bytes(self.memory_at_least)
        return self.device in (None, host.device) and few_enough and large_enough


class Matrix(Sizes):
    description: str = ""
    trials: int = Field(default=DEFAULT_TRIALS, ge=1)
    timed_seconds: float = Field(default=DEFAULT_TIMED_SECONDS, ge=0)
    time_budget_minutes: float | None = Field(default=None, gt=0)
    long_training: bool = True
    """Whether each strategy also trains a nano model for 200 steps, to verify late ones. Without
    timed seconds it does not."""
    only_what_fits: bool = False
    """Whether to leave out cells that by formula exceed a device's memory."""
    rehearse: bool = False
    """Whether to rehearse rank 0 of each cell before the run, so that the report compares its
    states with the measured ones."""
    hosts: list[Rule] = Field(default_factory=list)
    cells: list[Axes] = Field(min_length=1)

    def rule(self, host: Host) -> Rule:
        """Returns the first rule that fits a host, else an empty one."""
        return next((rule for rule in self.hosts if rule.fits(host)), Rule())

    def trials_on(self, host: Host) -> int:
        return self.rule(host).trials or self.trials


class SearchMatrix(Matrix):
    """Strategies whose largest size `bench maxsize` searches."""

    order: list[list[str]] = Field(default_factory=list)
    """Chains of cell labels in the order that theory predicts."""


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
    """Parses `60GiB`, `500MB` or a number. Raises UsageError for anything else."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgtKMGT]?i?[bB])?\s*", str(text))
    with contextlib.suppress(ValueError, KeyError, OverflowError):  # such as 1.2.3GiB or 1iB
        if match:
            return int(float(match[1]) * _UNITS[(match[2] or "B").upper()])
    raise UsageError(f"{text!r} is not an amount of memory; write it like 2GiB or 500MB")


def matrix_names() -> list[str]:
    return sorted(path.stem for path in HOME.glob("*.yaml"))


def matrix_text(name: str) -> str:
    """Returns the text of a matrix file; empty for a matrix of the suite."""
    file = Path(name)
    of_suite = (HOME / f"{name}.yaml").is_file()
    return "" if of_suite or not file.is_file() else file.read_text("utf-8", "replace")


def read_matrix(name: str) -> Matrix:
    """Reads a matrix by name or file; raises UsageError with file and key."""
    return read_as(name, Matrix)


def read_as(name: str, kind: type[AnyMatrix]) -> AnyMatrix:
    """Reads a matrix as `kind`, a subclass with further keys."""
    path = HOME / f"{name}.yaml"
    if not path.is_file():
        path = Path(name)
    if not path.is_file():
        raise UsageError(
            f"unknown matrix {name!r}; use one of {', '.join(matrix_names())}, or the path of a"
            " YAML file"
        )
    return matrix_of(parse_yaml(path.read_bytes(), f"matrix {path}"), kind, str(path))


def matrix_of(content: object, kind: type[AnyMatrix], name: str) -> AnyMatrix:
    """Checks a matrix; raises UsageError with its name and the key."""
    if not isinstance(content, dict):
        raise UsageError(f"matrix {name}: must be a mapping with a key 'cells'")
    require_keys(content, kind.model_fields, f"matrix {name}")
    try:
        matrix = kind(**content)
    except ValidationError as error:
        raise UsageError(f"matrix {name}, {first_error(error)}") from None
    places: list[tuple[str, Sizes | None]] = [("", matrix)]
    for index, rule in enumerate(matrix.hosts):
        places += [(f"hosts[{index}].", rule), (f"hosts[{index}].parity.", rule.parity)]
    for where, axes in [(f"{prefix}defaults", sizes.defaults) for prefix, sizes in places if sizes]:
        require_keys(axes, AXES, f"matrix {name}, {where}")
    lists = [("", matrix.cells)]
    lists += [(f"hosts[{index}].", rule.cells) for index, rule in enumerate(matrix.hosts)]
    for prefix, entries in lists:
        for index, entry in enumerate(entries):
            require_keys(entry, AXES, f"matrix {name}, {prefix}cells[{index}]")
    return matrix


def known_axes(axes: Mapping[str, object]) -> Axes:
    require_keys(axes, AXES, "settings")
    return dict(axes)


def axes_of(cell: Cell) -> Axes:
    """Returns the axes with which a matrix describes this cell."""
    given = {*cell.model_fields_set, "device", "parity_steps"}
    axes = cell.model_dump(include=given - {*FILLED_IN})
    batch = axes.pop("global_batch", cell.global_batch)
    axes["batch"] = batch // cell.devices if cell.regime == "weak" else batch
    return axes


def parse_changes(settings: Sequence[str]) -> Axes:
    """Parses `axis=value` options with YAML values: `devices=[1,2]` is a list."""
    changes: Axes = {}
    for setting in settings:
        axis, sign, value = setting.partition("=")
        if not sign:
            raise UsageError(
                f"--set {setting!r}: write it as axis=value, for example --set batch=16"
            )
        require_keys([axis], AXES, f"--set {setting!r}")
        changes[axis] = parse_yaml(value, f"--set {setting!r}")
    return changes


_HOST = r"\s* (?:([1-9]\d*) \s* x \s*)? ([^,]+?) \s* (?:, \s* ([1-9]\d*) \s* cores? \s*)?"


@dataclass(frozen=True)
class Host:
    device: str
    num_devices: int
    """Number of GPUs, or of CPU cores, which ranks may share."""
    memory_bytes: int
    """Memory of one GPU, or of the host."""
    nodes: int = 1
    name: str | None = None
    elsewhere: bool = False
    """Whether this is another host, so local installations do not count."""
    cores: int | None = None
    """Usable CPU cores per node; None if unknown."""

    @property
    def many(self) -> int:
        return 2 if self.device == "cpu" else next(n for n in (8, 4, 2, 1) if n <= self.num_devices)

    @classmethod
    def here(cls, nodes: int = 1) -> Host:
        from harness.host.cores import allowed_cores, memory_bytes
        from harness.host.environment import device_type, gpus

        cores = len(allowed_cores())
        if device_type() == "cuda":
            devices = gpus()
            name, memory = devices[0]
            return cls("cuda", len(devices), memory, nodes, name, cores=cores)
        return cls("cpu", cores, memory_bytes(), nodes, cores=cores)


def host_of(text: str, nodes: int) -> Host:
    """Returns this host, or that of `8 x h100-80gb, 112 cores`; raises UsageError for unknown
    GPUs."""
    from harness.host.gpu_models import gpu_named

    if not text:
        return Host.here(nodes)
    match = re.fullmatch(_HOST, text, re.VERBOSE | re.IGNORECASE)
    if match is None:
        raise UsageError(
            f"--host {text!r}: write it like '8 x h100-80gb' or '8 x h100-80gb, 112 cores'"
        )
    model = gpu_named(match[2])
    return Host(
        "cuda",
        int(match[1] or 1),
        model.memory_bytes,
        nodes,
        model.device_name,
        elsewhere=True,
        cores=int(match[3]) if match[3] else None,
    )


class UnsuitableData(Refused):
    """The cell's data and model do not match."""


def admit_here(cell: Cell, host: Host) -> None:
    """Raises UsageError, Refused or Unavailable if the cell cannot run here."""
    workload = make_workload(cell.workload)
    if cell.device == "cuda":
        if host.device != "cuda":
            validate(cell, workload)
            raise Unavailable("this torch finds no GPU that it can use; device: cpu runs here")
        _require_gpus(cell, host)
    try:
        validate(cell, workload, here=not host.elsewhere)
    except Unavailable:
        if not host.elsewhere:
            raise
    if cell.links and not host.elsewhere:
        from harness.links.emulated import unsupported_reason

        if reason := unsupported_reason():
            raise Unavailable(reason)
    if cell.nodes > host.nodes and not cell.links:
        raise Unavailable(
            f"needs {cell.nodes} nodes, this run has {host.nodes}; request them with python -m"
            f" bench submit --nodes {cell.nodes}"
        )
    try:
        workload.require_trainable(cell.sequence_length)
        prepare_data(cell.data, workload, cell.sequence_length)
        if workload.family is None:
            model_facts(workload, cell.sequence_length)
    except UsageError as error:
        raise UnsuitableData(str(error)) from None


def _require_gpus(cell: Cell, host: Host) -> None:
    least = make_strategy(cell).capabilities.min_devices
    needed = max(cell.devices, saving_cell(cell).devices, least)
    on_this_host = needed if cell.links else -(-needed // cell.nodes)
    if on_this_host > host.num_devices:
        where = "for its emulated nodes" if cell.links else "on a node" if cell.nodes > 1 else ""
        raise Unavailable(
            f"needs {' '.join(filter(None, (str(on_this_host), 'GPUs', where)))}, this host has"
            f" {host.num_devices}"
        )
