"""Input of a trial's ranks, and the files they leave."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.spec.cell import Cell
from harness.worker.interleave import TimeSlices
from harness.workloads import DataSource

if TYPE_CHECKING:
    from pydantic import TypeAdapter


@dataclass(frozen=True)
class TrialSpec:
    """Specification for every rank; small and picklable. A node fills in the last fields."""

    cell: Cell
    data: DataSource
    processes: int
    """Number of ranks on all nodes."""
    reference: str | None = None
    """Folder of the reference run to compare with; None to skip."""
    reference_output: str | None = None
    """Folder to write this trial to as a reference run."""
    max_restarts: int = 0
    profile: bool = False
    """Whether to profile instead of time the ranks (see harness/worker/profile.py)."""
    traces: str | None = None
    turns: TimeSlices | None = None
    """Time slices of an interleaved trial; None if it runs alone."""
    samples_per_control: int = 0
    """Samples of a rank per control (see harness/worker/control.py); 0 for no control."""
    timed_seconds: float = 0.0
    """With a control: least total time of the timed steps; never fewer than the cell's."""
    rewind_seed: int | None = None
    """Seed of the rewind schedule (see harness/worker/rewind.py); None for no rewinds."""
    node: int = 0
    node_name: str = ""
    """Name of this node; empty for the host's."""
    rendezvous: tuple[str, int] = ("127.0.0.1", 0)
    """Address and port of the store for the nodes' rendezvous, on node 0."""
    token: str = "trial"
    """Prefix of this trial's keys in the store."""
    interface: str | None = None
    """Network interface that reaches all ranks; None lets the libraries choose."""
    scratch: str = ""
    """Folder on this node for answers, logs, stacks and the strategy's files."""
    cores: tuple[tuple[int, ...], ...] = ()
    progress: str | None = None
    """Datagram socket for rank 0's progress; None for no reports."""
    parent: int = 0
    """Process id that the ranks must not outlive (fork server or launcher); 0 for an external
    launcher."""

    @property
    def ranks(self) -> range:
        """Returns this node's ranks: equally many per node, plus any non-device processes on the
        last."""
        each = self.processes // self.cell.nodes
        return range(
            self.node * each,
            self.processes if self.node == self.cell.nodes - 1 else (self.node + 1) * each,
        )

    def to_json(self) -> str:
        return json.dumps(_adapter().dump_python(self))

    @classmethod
    def from_json(cls, text: str) -> TrialSpec:
        """Parses the text of `to_json`; raises ValueError for anything else."""
        return _adapter().validate_python(json.loads(text))


@functools.cache
def _adapter() -> TypeAdapter[TrialSpec]:
    from pydantic import TypeAdapter

    return TypeAdapter(TrialSpec)


def log_file(scratch: str | Path, rank: int) -> Path:
    return Path(scratch) / f"rank{rank}.log"


def stacks_file(scratch: str | Path, rank: int) -> Path:
    return Path(scratch) / f"rank{rank}.stacks"


def pid_file(scratch: str | Path, rank: int) -> Path:
    return Path(scratch) / f"rank{rank}.pid"
