"""Control of a rank: a process on its cores that repeats a small computation between steps.

Its time shows how fast the machine is at that moment. It must not depend on the strategy, or it
would bias the strategy's result. So the fork server starts it under every launcher, and the rank's
threads are stopped while it runs.

If work that a step left to the rank's threads runs next to the control, its CPU time is added to
that step.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from harness.host.cores import threads_of
from harness.host.process import die_with_parent
from harness.seam.registry import make_strategy
from harness.worker.batches import Batches
from harness.worker.spec import TrialSpec
from harness.workloads import make_workload

_HELLO = struct.Struct("ii")
"""Header of a message: the rank's process id, and its number of restarts."""
_REQUEST = struct.Struct("d")
_ANSWER = struct.Struct("dddd")
_MESSAGE = struct.Struct("iid")
START_SECONDS = 60.0
OWN_SECONDS = 0.0005
"""CPU seconds in a pause up to which a rank counts as having left no work."""
_MALLOPT = {-1: 1 << 30, -3: 1 << 25}
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD (glibc's maximum), in bytes."""


@dataclass(frozen=True)
class Pause:
    control_seconds: float | None
    """Time of one sample's forward and backward pass; None for a rank without a control."""
    left_over_seconds: float
    """CPU time of the rank's threads after the end of all ranks' steps. Earlier, libraries may poll
    for slower ranks."""
    control_cpu_seconds: float
    largest: float


class Control:
    """Control process of one rank.

    All ranks pause together, from the end of the slowest rank's step until every control has
    finished. A control computes once per pause, because a second run would find warm caches. A
    server's control computes nothing.
    """

    def __init__(self, spec: TrialSpec, rank: int, cores: tuple[int, ...]) -> None:
        """Connects to the rank's control process; raises ConnectionError if it does not start."""
        cell = spec.cell
        self.every = max(1, round(spec.samples_per_control * cell.devices / cell.global_batch))
        self.serves = make_strategy(cell).layout(cell.devices).serves(rank)
        self.threads = threads_of(cell, cores)
        self.line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        deadline = time.monotonic() + START_SECONDS
        while self.line.connect_ex(_address(spec, rank)):
            if time.monotonic() > deadline:
                raise ConnectionError("the control process of this rank has not started")
            time.sleep(0.001)
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.line.send(_HELLO.pack(os.getpid(), restarts))

    def close(self) -> None:
        self.line.close()

    def pause(self, number: float = 0.0) -> Pause:
        """Waits while the control computes; returns its times and the ranks' largest `number`.
        Raises ConnectionError if the control process has died."""
        self.line.send(_REQUEST.pack(number))
        answer = self.line.recv(_ANSWER.size)
        if len(answer) != _ANSWER.size:
            raise ConnectionError("the control process of this rank has ended")
        seconds, cpu_seconds, largest, before = _ANSWER.unpack(answer)
        left_over = (time.process_time() - before) / self.threads
        left_over = left_over if left_over > OWN_SECONDS else 0.0
        # A running thread stops a little late, so the control may have to wait for it.
        control_seconds = max(seconds - left_over, cpu_seconds)
        return Pause(None if self.serves else control_seconds, left_over, cpu_seconds, largest)


def run_control(spec: TrialSpec, rank: int) -> None:
    """Runs a rank's control process until the rank and its restarts have ended.

    Its session is separate, because Linux schedules by session (autogroup, sched(7)).
    """
    die_with_parent()
    os.setsid()
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, spec.cores[rank - spec.ranks.start])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(_address(spec, rank))
        listener.listen()
        for _ in range(1 + spec.max_restarts):
            line, _ = listener.accept()
            with line, contextlib.suppress(OSError, EOFError):
                _serve(spec, rank, line)


def _address(spec: TrialSpec, rank: int) -> str:
    return f"{spec.scratch}/control{rank}"


def _serve(spec: TrialSpec, rank: int, line: socket.socket) -> None:
    process, restarts = _HELLO.unpack(line.recv(_HELLO.size))
    others = _Others(spec, rank, line, restarts)
    of_rank = _processor_clock(process)
    serves = make_strategy(spec.cell).layout(spec.cell.devices).serves(rank)
    compute: Callable[[], None] | None = None
    while request := line.recv(_REQUEST.size):
        compute = compute or ((lambda: None) if serves else _computation(spec, rank))
        (number,) = _REQUEST.unpack(request)
        largest = others.wait(number)
        before = time.clock_gettime(of_rank)
        with _stopped(process):
            began, cpu_began = time.perf_counter(), time.process_time()
            compute()
            seconds = time.perf_counter() - began
            cpu_seconds = time.process_time() - cpu_began
            others.wait(0.0)
            # Answer before the rank resumes, as one of its threads may then keep the core for a
            # long time.
            line.send(_ANSWER.pack(seconds, cpu_seconds, largest, before))


def _processor_clock(process: int) -> int:
    """Returns another process's CPU-time clock (clock_getcpuclockid(3))."""
    clock = ctypes.c_int()
    if error := ctypes.CDLL(None).clock_getcpuclockid(process, ctypes.byref(clock)):
        raise OSError(error, os.strerror(error))
    return clock.value


@contextlib.contextmanager
def _stopped(process: int) -> Iterator[None]:
    """Stops a process, whose threads would slow the control down or work unmeasured."""
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def _keep_memory() -> None:
    """Makes the allocator keep freed memory: glibc's thresholds depend on earlier frees
    (mallopt(3)), so page faults would differ by a factor of two."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for parameter, threshold in _MALLOPT.items():
            libc.mallopt(parameter, threshold)


def _computation(spec: TrialSpec, rank: int) -> Callable[[], None]:
    import torch

    _keep_memory()
    torch.set_num_threads(threads_of(spec.cell, spec.cores[rank - spec.ranks.start]))
    cell, device = spec.cell, torch.device("cpu")
    workload = make_workload(cell.workload)
    model = workload.build(cell.seed, device)
    # In training mode, BatchNorm may need several values.
    size = workload.counted_samples
    batch = Batches(spec.data, cell.seed, size, slice(0, size), device).fetch(0)

    def compute() -> None:
        workload.loss(workload.logits(model, batch.inputs), batch.labels).backward()
        for parameter in model.parameters():
            parameter.grad = None

    compute()
    return compute


class _Others:
    def __init__(self, spec: TrialSpec, rank: int, line: socket.socket, restarts: int) -> None:
        self.addresses = [
            f"{spec.scratch}/others{restarts}.{other}" for other in range(spec.processes)
        ]
        self.line = line
        self.rank = rank
        self.came: list[int] = [0] * spec.processes
        self.numbers: dict[tuple[int, int], float] = {}
        """Numbers that ranks sent, by pause (from 1) and rank."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.addresses[rank])
        self.sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sender.setblocking(False)

    def wait(self, number: float) -> float:
        """Waits for all ranks' controls; returns their largest number. Raises EOFError if this rank
        has ended."""
        turn = self.came[self.rank] = self.came[self.rank] + 1
        self.numbers[turn, self.rank] = number
        for rank, address in enumerate(self.addresses):
            if rank != self.rank:
                self._send(_MESSAGE.pack(self.rank, turn, number), address)
        while min(self.came) < turn:
            self._receive()
        return max(self.numbers.pop((turn, rank)) for rank in range(len(self.came)))

    def _send(self, message: bytes, address: str) -> None:
        """Sends to another rank's control, and receives while its queue is full. A queue holds 11
        messages (net.unix.max_dgram_qlen), so controls could block each other."""
        while True:
            try:
                # Only a connected socket becomes writable when the other's queue has room.
                self.sender.connect(address)
                self.sender.send(message)
                return
            except (FileNotFoundError, ConnectionRefusedError):
                self._receive(seconds=0.001)
            except BlockingIOError:
                self._receive(or_writable=[self.sender])

    def _receive(
        self, or_writable: Sequence[socket.socket] = (), seconds: float | None = None
    ) -> None:
        """Waits until a message arrives, which it takes, until the socket becomes writable, or
        until the time has passed."""
        ready, _, _ = select.select([self.socket, self.line], or_writable, [], seconds)
        if self.line in ready:  # a rank sends nothing while it waits
            raise EOFError("the rank has ended")
        if self.socket in ready:
            rank, pauses, number = _MESSAGE.unpack(self.socket.recv(_MESSAGE.size))
            self.came[rank] = pauses
            self.numbers[pauses, rank] = number
