"""What a trial's ranks are told, and what each of them answers."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.cell import Cell
from harness.workloads import DataSource


@dataclass(frozen=True)
class TrialSpec:
    """Sent to every rank of a trial; small and picklable."""

    cell: Cell
    scratch: str
    """Folder of this trial: answers, logs, stacks, the strategy's own files."""
    data: DataSource
    processes: int
    cores: tuple[tuple[int, ...], ...]
    """CPU cores of each local rank."""
    reference: str | None
    """Folder of the reference run to compare with; None: not compared."""
    reference_output: str | None = None
    """Folder that this trial is to write as a reference run."""
    progress: str | None = None
    """Address of a datagram socket that likes to hear of steps."""
    parent: int = 0
    """Process id that the ranks must not outlive: the fork server's, or the launcher's own; 0 for another launcher's."""
    interface: str | None = None
    """Network interface of gloo; None leaves the choice to it."""
    explain: bool = False
    """Whether the ranks are to say where time and memory go, instead of being timed (see harness/explain.py)."""
    traces: str | None = None
    """Folder for the traces of such a launch."""


def answer_file(scratch: str | Path, rank: int) -> Path:
    return Path(scratch) / f"rank{rank}.json"


def log_file(scratch: str | Path, rank: int) -> Path:
    return Path(scratch) / f"rank{rank}.log"


def stacks_file(scratch: str | Path, rank: int) -> Path:
    return Path(scratch) / f"rank{rank}.stacks"


def pid_file(scratch: str | Path, rank: int) -> Path:
    return Path(scratch) / f"rank{rank}.pid"


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)
