"""What a rank shows of itself while it runs: a heartbeat for each phase and step that it finished,
and, when it is asked, which collective it entered last."""

from __future__ import annotations

import json
import mmap
import socket
import struct
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

_BEAT = struct.Struct("<qdd64s")
MEETING = "process group"
"""The phase in which the ranks of a trial wait for each other to come."""


@dataclass(frozen=True)
class Beat:
    """The last heartbeat of a rank."""

    steps: int
    """That it has finished."""
    at: float
    """Seconds of time.monotonic, which all processes of a machine share."""
    longest: float
    """Seconds of its longest phase or step so far."""
    doing: str
    """What it began then."""


class Heartbeat:
    """Kept in a file that is mapped to memory: a beat costs a microsecond, and no system call."""

    def __init__(self, scratch: str | Path, rank: int) -> None:
        with open(beat_file(scratch, rank), "w+b") as file:
            file.truncate(_BEAT.size)
            self._memory = mmap.mmap(file.fileno(), _BEAT.size)
        self._steps, self._longest, self._last = 0, 0.0, time.monotonic()
        self.beat("imports")

    def beat(self, doing: str, steps: int | None = None) -> None:
        """A phase or step is finished, and `doing` begins. `steps`: how many are finished now."""
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last)
        self._steps = self._steps if steps is None else steps
        self._last = now
        _BEAT.pack_into(self._memory, 0, self._steps, now, self._longest, doing.encode()[:64])

    def forget(self) -> None:
        """The time since the last beat was spent waiting, and counts for no phase."""
        self._last = time.monotonic()


def beat_file(scratch: str | Path, rank: int) -> Path:
    return Path(scratch) / f"rank{rank}.beat"


def read_beat(scratch: str | Path, rank: int) -> Beat | None:
    """The last heartbeat of a rank; None before its first."""
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
    """How far a rank has come in the collectives of one process group."""

    group: str
    ranks: tuple[int, ...]
    """Its members."""
    entered: int
    """Number of the last collective that it entered, from 1; 0: none."""
    operation: str
    """Of that collective, such as `gloo:all_reduce`."""


def question_file(scratch: str | Path, rank: int) -> Path:
    return Path(scratch) / f"rank{rank}.ask"


def groups_file(scratch: str | Path, rank: int) -> Path:
    return Path(scratch) / f"rank{rank}.groups"


def answer_questions(scratch: str | Path, rank: int) -> None:
    """Answers each datagram to the rank's socket with a file of GroupStates, from a thread that
    sleeps in between. It answers while a collective hangs, as torch waits without the GIL."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    question_file(scratch, rank).unlink(missing_ok=True)  # of the rank before a restart
    try:
        listener.bind(str(question_file(scratch, rank)))
    except OSError:  # the folder's path is longer than a socket's may be: nobody can ask
        listener.close()
        return

    def serve() -> None:
        while listener.recv(16):
            file = groups_file(scratch, rank)
            temporary = file.with_suffix(".tmp")
            temporary.write_text(json.dumps([asdict(state) for state in group_states()]))
            temporary.replace(file)

    threading.Thread(target=serve, daemon=True, name="groups").start()


def group_states() -> list[GroupState]:
    """Of all process groups that this process is in, by torch's flight recorder, which keeps the
    last collectives; empty without torch.distributed, or where the recorder is off."""
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
