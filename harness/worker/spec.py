"""Input of a trial's ranks, and the files they leave."""

from __future__ import annotations

import functools
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.spec.cell import Cell
from harness.workloads import DataSource

if TYPE_CHECKING:
    from pydantic import TypeAdapter


CYCLES_IN_A_TURN = 2
"""Cycles per turn: shorter turns are closer in time to their neighbours.
docs/studies/statistical-power.md compares turns of 2, 5, 10 and 20 steps."""


@dataclass(frozen=True)
class TimeSlices:
    address: str
    """Address of the socket that grants turns."""
    steps: int
    """Timed steps per slice, after a settling one."""

    @classmethod
    def of(cls, address: str, cycle: int) -> TimeSlices:
        """`cycle`: steps after which the strategy's work repeats."""
        return cls(address, CYCLES_IN_A_TURN * cycle)

    def begins(self, number: int) -> bool:
        """Returns whether a turn begins with step `number` after the warm-up (settling steps
        count)."""
        return number >= 0 and number % (self.steps + 1) == 0


class TurnClient:
    """Connection to the process that grants turns."""

    def __init__(self, address: str) -> None:
        self.line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.connect(address)

    def wait(self, step: int, seconds: float) -> float:
        """Ends the turn and waits for the next; returns its start in seconds after the epoch.

        `step`, `seconds`: the last step's, for the progress display. Raises ConnectionError if
        nobody grants turns any more.
        """
        self.line.send(f"{os.getpid()} {step} {seconds}".encode())
        if not self.line.recv(8):
            raise ConnectionError("the run that interleaves the trials has exited")
        return time.time()


@dataclass(frozen=True)
class Checkpointing:
    """What a launch of a restarted trial does with its checkpoint."""

    folder: str
    step: int
    """Number of training steps before the checkpoint."""
    loads: bool
    """Whether the ranks load it, or save it and are killed."""


@dataclass(frozen=True)
class TrialSpec:
    """Specification for every rank; small and picklable. A node fills in the last fields."""

    cell: Cell
    data: DataSource
    processes: int
    """Ranks on all nodes."""
    reference: str | None = None
    """Folder of the reference run to compare with."""
    reference_output: str | None = None
    """Folder to write this trial to as a reference run."""
    max_restarts: int = 0
    profile: bool = False
    traces: str | None = None
    turns: TimeSlices | None = None
    """Turns of an interleaved trial; None if it runs alone."""
    samples_per_control: int = 0
    """Samples of a rank per control (harness/worker/control_process.py); 0: no control."""
    timed_seconds: float = 0.0
    """With a control: least total time of the timed steps; never fewer than the cell's."""
    rewind_seed: int | None = None
    """Seed of the rewind schedule (harness/worker/rewind.py); None: no rewinds."""
    checkpoint: Checkpointing | None = None
    """Checkpoint of a restarted trial; None for other trials."""
    node: int = 0
    node_name: str = ""
    """Name of this node; empty for the host's."""
    rendezvous: tuple[str, int] = ("127.0.0.1", 0)
    """Address and port of the store on node 0."""
    token: str = "trial"
    """Prefix of the trial's keys in the store."""
    interface: str | None = None
    """Interface that reaches all ranks; None lets the libraries choose."""
    scratch: str = ""
    """Folder for answers, logs, stacks and the strategy's files."""
    cores: tuple[tuple[int, ...], ...] = ()
    progress: str | None = None
    """Datagram socket for rank 0's progress."""
    parent: int = 0
    """Process that the ranks must not outlive (fork server or launcher); 0 for an external
    launcher."""

    @property
    def ranks(self) -> range:
        """Returns this node's ranks: equally many per node, plus other processes on the last."""
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
