"""What a trial's ranks are told, and the files that they leave."""

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
    """Sent to every rank of a trial; small and picklable.

    What a node fills in for its own ranks comes last.
    """

    cell: Cell
    data: DataSource
    processes: int
    """Of all nodes together."""
    reference: str | None = None
    """Folder of the reference run to compare with; None: not compared."""
    reference_output: str | None = None
    """Folder that this trial is to write as a reference run."""
    max_restarts: int = 0
    """Elastic restarts that the ranks may take."""
    profile: bool = False
    """Whether the ranks are profiled instead of timed (see harness/worker/profile.py)."""
    traces: str | None = None
    """Folder for the traces of such a launch."""
    turns: TimeSlices | None = None
    """How this launch trains by turns with others; None: alone."""
    samples_per_control: int = 0
    """A control runs between the steps, once for so many samples of its rank (see
    harness/worker/control.py); 0: none does."""
    timed_seconds: float = 0.0
    """With a control: timed steps are taken until they take so long together, but no fewer than
    the cell says."""
    set_back_seed: int | None = None
    """Decides when the state is set back to an earlier step (see harness/worker/set_back.py); None:
    never."""
    node: int = 0
    """Which of the cell's nodes this is."""
    node_name: str = ""
    """Empty: the host's."""
    rendezvous: tuple[str, int] = ("127.0.0.1", 0)
    """Address and port of the store at which the nodes meet; it is on node 0."""
    token: str = "trial"
    """Prefix of this trial's keys in that store."""
    interface: str | None = None
    """Network interface that reaches all ranks; None leaves the choice to the libraries."""
    scratch: str = ""
    """Folder of this trial on this node: answers, logs, stacks, the strategy's own files."""
    cores: tuple[tuple[int, ...], ...] = ()
    """CPU cores of each local rank."""
    progress: str | None = None
    """Address of the datagram socket to which rank 0 reports its finished steps; None: nobody
    listens."""
    parent: int = 0
    """Process id that the ranks must not outlive: the fork server's, or the launcher's own; 0 for
    another launcher's."""

    @property
    def ranks(self) -> range:
        """The ranks of this node: equally many on each, and processes beside the devices' on the
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
        """The value of which `to_json` was asked; raises ValueError for anything else."""
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
