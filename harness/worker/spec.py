from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from harness.cell.cell import Cell
from harness.cell.yaml_text import adapter, parsed
from harness.workloads import DataSource

STEPS_IN_A_TURN = 2
"""Number of timed steps per turn, after one settling step. Short turns are close in time to those
of other trials (docs/studies/statistical-power.md)."""


def begins_turn(number: int) -> bool:
    """Returns whether step `number` after the warm-up begins a turn."""
    return number >= 0 and number % (STEPS_IN_A_TURN + 1) == 0


class TurnClient:
    """Connection to the process that grants turns."""

    def __init__(self, address: str) -> None:
        self.line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.connect(address)

    def wait(self, step: int, seconds: float) -> float:
        """Ends this turn and waits for the next; returns its start in seconds after the epoch.
        Raises ConnectionError if the granting process is gone. `step`, `seconds`: for the progress
        display."""
        self.line.send(f"{os.getpid()} {step} {seconds}".encode())
        if not self.line.recv(8):
            raise ConnectionError("the run that interleaves the trials has exited")
        return time.time()


@dataclass(frozen=True)
class Checkpointing:
    folder: str
    step: int
    loads: bool
    """Whether the ranks load it; otherwise they save it and are killed."""


@dataclass(frozen=True)
class TrialSpec:
    """Specification for every rank. Each node fills in the fields from `interface` on."""

    cell: Cell
    data: DataSource
    processes: int
    reference: str | None = None
    reference_output: str | None = None
    max_restarts: int = 0
    profile: bool = False
    traces: str | None = None
    turns: str | None = None
    """Socket that grants turns to an interleaved trial."""
    samples_per_control: int = 0
    """Number of samples that a rank trains per control (harness/worker/control_process.py). 0 means
    no control."""
    timed_seconds: float = 0.0
    """Minimum total seconds of timed steps, if the trial has a control."""
    timed_steps: int | None = None
    """Number of timed steps of an interleaved trial. None for the cell's number."""
    rewind_seed: int | None = None
    """Seed of the rewind schedule (harness/worker/rewind.py). None if the state is never
    rewound."""
    checkpoint: Checkpointing | None = None
    sketched_after: tuple[int, ...] = ()
    """Numbers of training steps after which ranks sketch their parameters."""
    node: int = 0
    node_name: str = ""
    rendezvous: tuple[str, int] = ("127.0.0.1", 0)
    token: str = "trial"
    """Prefix of the trial's keys in the store."""
    interface: str | None = None
    scratch: str = ""
    """Folder for answers, logs, stacks and the strategy's files."""
    cores: tuple[tuple[int, ...], ...] = ()
    progress: str | None = None

    @property
    def ranks(self) -> range:
        """Returns this node's ranks. Every node has equally many ranks; servers are on the last
        node."""
        per_node = self.processes // self.cell.nodes
        return range(
            self.node * per_node,
            self.processes if self.node == self.cell.nodes - 1 else (self.node + 1) * per_node,
        )

    def to_json(self) -> str:
        return json.dumps(adapter(TrialSpec).dump_python(self))

    @classmethod
    def from_json(cls, text: str) -> TrialSpec:
        """Parses the output of `to_json`; raises ValueError for anything else."""
        return parsed(cls, text)


def log_file(scratch: str | Path, rank: int) -> Path:
    return Path(scratch) / f"rank{rank}.log"


def stacks_file(scratch: str | Path, rank: int) -> Path:
    return Path(scratch) / f"rank{rank}.stacks"


def pid_file(scratch: str | Path, rank: int) -> Path:
    return Path(scratch) / f"rank{rank}.pid"
