from __future__ import annotations

import contextlib
import json
import mmap
import socket
import struct
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.cell.durable import write_atomically

_BEAT = struct.Struct("<qdd64s")
RENDEZVOUS = "process group"
"""Phase in which ranks wait for each other."""


@dataclass(frozen=True)
class Beat:
    steps: int
    at: float
    """Time of the beat, as time.monotonic gives it."""
    longest: float
    doing: str
    """Phase or step that began with the beat."""


class Heartbeat:
    """Writes heartbeats to mapped memory, without system calls."""

    def __init__(self, scratch: str | Path, rank: int) -> None:
        with open(beat_file(scratch, rank), "w+b") as file:
            file.truncate(_BEAT.size)
            self._memory = mmap.mmap(file.fileno(), _BEAT.size)
        self._steps, self._longest, self._last = 0, 0.0, time.monotonic()
        self.beat("imports")

    def beat(self, doing: str, steps: int | None = None) -> None:
        """Records the beginning of phase or step `doing`. `steps`: number of finished steps."""
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last)
        self._steps = self._steps if steps is None else steps
        self._last = now
        _BEAT.pack_into(self._memory, 0, self._steps, now, self._longest, doing.encode()[:64])

    def forget(self) -> None:
        """Excludes the time since the last beat."""
        self._last = time.monotonic()


def beat_file(scratch: str | Path, rank: int) -> Path:
    return Path(scratch) / f"rank{rank}.beat"


def read_beat(scratch: str | Path, rank: int) -> Beat | None:
    try:
        content = beat_file(scratch, rank).read_bytes()
    except FileNotFoundError:
        return None
    if len(content) < _BEAT.size:
        return None
    steps, at, longest, doing = _BEAT.unpack(content)
    return Beat(steps, at, longest, doing.rstrip(b"\0").decode("utf-8", "replace")) if at else None


@dataclass(frozen=True)
class GroupState:
    group: str
    ranks: tuple[int, ...]
    entered: int
    """Sequence number of the last collective that the rank entered; 0 if it entered none."""
    operation: str


def question_file(scratch: str | Path, rank: int) -> Path:
    return Path(scratch) / f"rank{rank}.ask"


def groups_file(scratch: str | Path, rank: int) -> Path:
    return Path(scratch) / f"rank{rank}.groups"


def answer_questions(scratch: str | Path, rank: int) -> None:
    """Starts a thread that answers each datagram with a file of GroupStates, even while a
    collective hangs: torch waits without the GIL."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    question_file(scratch, rank).unlink(missing_ok=True)  # left over from before a restart
    try:
        listener.bind(str(question_file(scratch, rank)))
    except OSError:  # the path is too long for a socket
        listener.close()
        return

    def serve() -> None:
        while listener.recv(16):
            states = json.dumps([asdict(state) for state in group_states()])
            write_atomically(groups_file(scratch, rank), states, lasting=False)

    threading.Thread(target=serve, daemon=True, name="groups").start()


def group_states() -> list[GroupState]:
    """Returns the state of this process's groups from torch's flight recorder."""
    import torch.distributed as dist
    from torch._C import _distributed_c10d
    from torch.distributed import distributed_c10d

    if not dist.is_available() or not dist.is_initialized():
        return []
    of_nccl = dist.get_backend() == "nccl" and hasattr(_distributed_c10d, "_dump_nccl_trace_json")
    dump = getattr(_distributed_c10d, f"_dump_{'nccl' if of_nccl else 'fr'}_trace_json")
    entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    last: dict[str, tuple[int, str]] = {}
    for entry in entries:
        if not entry["is_p2p"]:
            number, name = entry["collective_seq_id"], entry["process_group"][0]
            last[name] = max(last.get(name, (0, "")), (number, entry["profiling_name"]))
    world = distributed_c10d._world
    return [
        GroupState(name, tuple(world.pg_group_ranks[group]), *last.get(name, (0, "")))
        for group, name in world.pg_names.items()
    ]


class Progress:
    """Reports at most two steps per second to the parent process, without blocking."""

    def __init__(self, address: str | None) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if address else None
        if self.socket:
            self.socket.setblocking(False)
        self.last = 0.0

    def tell(self, step: int, seconds: float) -> None:
        now = time.monotonic()
        if self.socket is None or self.address is None or now - self.last < 0.5:
            return
        self.last = now
        with contextlib.suppress(OSError):
            self.socket.sendto(
                json.dumps({"step": step, "seconds": seconds}).encode(), self.address
            )
