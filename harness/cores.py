"""Which CPU cores a process may use, and which of them the ranks of a node get."""

from __future__ import annotations

import os
from pathlib import Path

from harness.cell import Cell
from harness.trial import TrialSpec


def allowed_cores() -> list[int]:
    """The CPU cores this process may use, one hardware thread per core first."""
    allowed = sorted(os.sched_getaffinity(0))
    first: list[int] = []
    rest: list[int] = []
    seen: set[str] = set()
    for core in allowed:
        path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        siblings = path.read_text().strip() if path.exists() else str(core)
        (rest if siblings in seen else first).append(core)
        seen.add(siblings)
    return first + rest


def pin(cell: Cell, spec: TrialSpec) -> tuple[tuple[int, ...], ...]:
    """Cores of each local process: its devices' own (a server has one's), round and round where there are more than cores."""
    cores = allowed_cores()
    per_process = cell.threads_per_device * max(1, cell.devices // spec.processes)
    return tuple(tuple(sorted({cores[(p * per_process + i) % len(cores)] for i in range(per_process)})) for p in range(len(spec.ranks)))


def oversubscribed(cell: Cell, processes: int = 0, cores: int | None = None) -> bool:
    """Whether its devices, or its processes where servers make them more, have more threads than there are cores.

    `cores`: of all nodes together; without it every node is taken to have as many as this host.
    """
    return cell.threads_per_device * max(cell.devices, processes) > (cell.nodes * len(allowed_cores()) if cores is None else cores)
