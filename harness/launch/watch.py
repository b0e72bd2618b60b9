from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from harness.host.process import descendants
from harness.host.tcp_store import RENDEZVOUS_SECONDS
from harness.worker.rank_answer import answer_file
from harness.worker.reporting import RENDEZVOUS, GroupState, groups_file, question_file, read_beat
from harness.worker.spec import pid_file, stacks_file

VARIABLE = "PARALLELISM_BENCH_HANG_SECONDS"
"""Environment variable with the seconds of silence that count as a hang; 0 turns this off."""
SECONDS = 15.0
COLD_GPU_SECONDS = 60.0
"""Seconds that count as a hang before the first GPU step, since GPUs and NCCL start without using a
core."""
TIMES_LONGEST = 10
"""Multiple of its longest phase or step for which a rank may be silent."""
LOOK_SECONDS = 0.5
_BUSY_SHARE = 0.05
"""Share of a core that counts as work."""
_BYTES_LIKE_A_SECOND = 1e8
"""Number of bytes of I/O that count as one second of work."""
_PY_SPY_SECONDS = 10


def allowed_seconds() -> float:
    try:
        return max(0.0, float(os.environ.get(VARIABLE, SECONDS)))
    except ValueError:
        return SECONDS


@dataclass(frozen=True)
class Hang:
    """Ranks that finished no phase or step for too long."""

    seconds: float
    doing: dict[int, str]

    def description(self) -> str:
        doing = sorted(set(self.doing.values()))
        return f"hangs: no rank made progress for {self.seconds:.0f} s in {', '.join(doing)}"


class Silence:
    """Seconds since each rank's last heartbeat, without suspensions.

    Before the first step, use of a core or disk is a sign of life, since imports and compilation
    have no steps.
    """

    def __init__(
        self,
        scratch: str,
        ranks: Iterable[int],
        pids: Callable[[], Mapping[int, int]],
        other_nodes: bool = False,
        on_gpus: bool = False,
    ) -> None:
        """`pids`: returns the ranks' process ids. `other_nodes`: whether other ranks' work is
        unseen. `on_gpus`: see COLD_GPU_SECONDS."""
        self.scratch, self.ranks, self.pids = scratch, tuple(ranks), pids
        self._waits_for_nodes = {RENDEZVOUS: float(RENDEZVOUS_SECONDS)} if other_nodes else {}
        """Minimum allowed silence in seconds, by phase."""
        self.allowed = allowed_seconds()
        self._cold_seconds = COLD_GPU_SECONDS if on_gpus else 0.0
        self._silent: dict[int, float] = {}
        self._beats: dict[int, float] = {}
        self._work: dict[int, float] = {}

    def look(self, passed: float) -> Hang | None:
        """Checks all ranks, `passed` seconds after the last check. Returns the hang, or None."""
        if not self.allowed:
            return None
        passed, pids = min(passed, 4 * LOOK_SECONDS), self.pids()
        longest, doing = 0.0, {}
        beats = {
            rank: beat
            for rank in self.ranks
            if (beat := read_beat(self.scratch, rank))
            and not answer_file(self.scratch, rank).exists()
        }
        for rank in self._silent.keys() - beats.keys():
            del self._silent[rank]
        # Check all of them, since only work since the last check counts.
        early = [pids[rank] for rank, beat in beats.items() if not beat.steps and rank in pids]
        worked = [self._works(pid, passed) for pid in early]
        for rank, beat in beats.items():
            longest = max(longest, beat.longest)
            self._silent[rank] = self._silent.get(rank, 0.0) + passed
            if beat.at != self._beats.get(rank) or (any(worked) and not beat.steps):
                self._beats[rank], self._silent[rank] = beat.at, 0.0
            doing[rank] = beat.doing
        limit = max(self.allowed, TIMES_LONGEST * longest)
        if not all(beat.steps for beat in beats.values()):  # ranks ahead wait for a cold one
            limit = max(limit, self._cold_seconds)
        hanging = {
            rank: text
            for rank, text in doing.items()
            if self._silent[rank] >= max(limit, self._waits_for_nodes.get(text, 0.0))
        }
        return Hang(max(self._silent[rank] for rank in hanging), hanging) if hanging else None

    def _works(self, pid: int, passed: float) -> bool:
        seconds = size = 0.0
        for process_id in (pid, *descendants(pid)):
            with contextlib.suppress(psutil.Error, AttributeError):
                process = psutil.Process(process_id)
                times, io = process.cpu_times(), process.io_counters()
                seconds += times.user + times.system
                # System calls, and disk reads from page faults in mapped files.
                size += io.read_chars + io.write_chars + io.read_bytes + io.write_bytes
        before, self._work[pid] = self._work.get(pid), seconds + size / _BYTES_LIKE_A_SECOND
        return before is not None and self._work[pid] - before > _BUSY_SHARE * passed


def ask_ranks(scratch: str, pids: Mapping[int, int]) -> None:
    """Makes ranks dump Python stacks, collectives and, with py-spy, native stacks."""
    for rank, pid in pids.items():
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ask:
            ask.setblocking(False)
            ask.sendto(b"groups", str(question_file(scratch, rank)))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)
    installed = shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program := installed or shutil.which("py-spy"):
        dumps = [(rank, _py_spy(program, pid)) for rank, pid in pids.items()]
        for rank, process in dumps:
            text = b""
            with contextlib.suppress(subprocess.TimeoutExpired):
                text, _ = process.communicate(timeout=_PY_SPY_SECONDS)
            process.kill()
            process.wait()
            with open(stacks_file(scratch, rank), "ab") as stacks:
                stacks.write(b"\nnative, by py-spy:\n" + text)


def _py_spy(program: str, pid: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [program, "dump", "--native", "--pid", str(pid)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def read_groups(scratch: str, rank: int) -> list[GroupState]:
    try:
        content = json.loads(groups_file(scratch, rank).read_text())
        return [GroupState(**{**state, "ranks": tuple(state["ranks"])}) for state in content]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def missing(groups: Mapping[int, list[GroupState]], stacks: Mapping[int, str]) -> str:
    """Describes which ranks the other ranks wait for, by entered collectives, or else by who is
    inside a communication library. Empty if unknown."""
    by_group: dict[str, dict[int, GroupState]] = {}
    for rank, states in groups.items():
        for state in states:
            by_group.setdefault(state.group, {})[rank] = state
    for group, states_by_rank in sorted(by_group.items()):
        furthest = max(states_by_rank.values(), key=lambda state: state.entered)
        entered = {rank: state.entered for rank, state in states_by_rank.items()}
        late = sorted(
            rank
            for rank in furthest.ranks
            if rank in groups and entered.get(rank, 0) < furthest.entered
        )
        if late and len(late) < len(furthest.ranks):
            where = "" if len(by_group) == 1 else f" of process group {group}"
            return (
                f"{_ranks(late)} never entered {furthest.operation} {furthest.entered}{where},"
                f" where the others of its {len(furthest.ranks)} ranks wait"
            )
    waiting = [rank for rank, text in stacks.items() if _communicates(text)]
    absent = sorted((stacks.keys() | groups.keys()) - set(waiting))
    if waiting and absent:
        return f"{_ranks(absent)} did not reach the point where the others wait for each other"
    return ""


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


_COMMUNICATES = (
    "torch/distributed/",
    "horovod/",
    "/deepspeed/comm/",
    "_engine_run_backward",
    "_parameter_server",
)
_INNERMOST = 6
"""Number of innermost stack frames that are searched for a communication library."""


def _communicates(stack: str) -> bool:
    main = stack.rpartition("Thread 0x")[2] if "Current thread" not in stack else stack
    main = main.rpartition("Current thread")[2]
    frames = [line for line in main.splitlines() if line.strip().startswith("File ")]
    return any(word in line for line in frames[:_INNERMOST] for word in _COMMUNICATES)


def pids_by_rank(scratch: str, ranks: range) -> dict[int, int]:
    files = {rank: pid_file(scratch, rank) for rank in ranks}
    return {r: int(text) for r, f in files.items() if f.exists() and (text := f.read_text())}


@contextlib.contextmanager
def listen(scratch: str, on_progress: Callable[[int, float], None] | None) -> Iterator[str | None]:
    """Yields the address of a socket for rank 0's progress."""
    if on_progress is None:
        yield None
        return
    address = str(Path(scratch) / "progress")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)

        def read() -> None:
            while message := listener.recv(1024):
                if message == b"stop":
                    return
                progress = json.loads(message)
                on_progress(progress["step"], progress["seconds"])

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield address
        finally:
            listener.connect(address)
            listener.send(b"stop")
            thread.join()


def _kill_until(over: threading.Event, kill: Callable[[], object]) -> None:
    """Kills repeatedly: torch's elastic agent restarts ranks, and more may be starting."""
    while not over.is_set():
        kill()
        over.wait(0.1)


@contextlib.contextmanager
def ended_by(stop: threading.Event | None, kill: Callable[[], object]) -> Iterator[None]:
    """Ends the ranks when `stop` is set. Kills repeatedly, since more ranks may be starting."""
    if stop is None:
        yield
        return
    over = threading.Event()

    def wait() -> None:
        stop.wait()
        _kill_until(over, kill)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        stop.set()
        thread.join()


class Watch:
    """Ends the ranks at the time limit or on a hang, after asking for their stacks. `waited`:
    returns the seconds that do not count."""

    def __init__(
        self,
        scratch: str,
        ranks: range,
        seconds: float,
        kill: Callable[[], object],
        waited: Callable[[], float],
        other_nodes: bool = False,
        on_gpus: bool = False,
    ) -> None:
        self.scratch, self.ranks, self.seconds = scratch, ranks, seconds
        self.kill, self.waited = kill, waited
        self.passed = False
        self.hang: Hang | None = None
        self._silence = Silence(
            scratch, ranks, lambda: pids_by_rank(scratch, ranks), other_nodes, on_gpus
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._wait, daemon=True)

    def __enter__(self) -> Watch:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Stops watching: from now on, neither a hang nor the time limit is noticed."""
        self._over.set()
        self._thread.join()

    def _wait(self) -> None:
        looked, waited = time.monotonic(), self.waited()
        while (left := self.seconds + self.waited() - (time.monotonic() - self._began)) > 0:
            if self._over.wait(min(left, LOOK_SECONDS)):
                return
            now, waited_now = time.monotonic(), self.waited()
            self.hang = self._silence.look(max(0.0, now - looked - (waited_now - waited)))
            looked, waited = now, waited_now
            if self.hang:
                break
        self.passed = self.hang is None
        ask_ranks(self.scratch, pids_by_rank(self.scratch, self.ranks))
        _kill_until(self._over, self.kill)
