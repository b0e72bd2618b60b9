"""The host that a matrix is planned for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness.spec.cell import Cell
from harness.spec.errors import Refused, Unavailable, UsageError
from harness.strategy.checkpoints import saving_cell
from harness.strategy.registry import make_strategy, validate
from harness.workloads import make_workload, prepare_data
from harness.workloads.counts import model_facts

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
    """Usable CPU cores per node; None: unknown."""

    @property
    def many(self) -> int:
        return 2 if self.device == "cpu" else next(n for n in (8, 4, 2, 1) if n <= self.num_devices)

    @classmethod
    def here(cls, nodes: int = 1) -> Host:
        from harness.host.cores import allowed_cores
        from harness.host.environment import device_type, gpus
        from harness.host.memory_limits import memory_bytes

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
