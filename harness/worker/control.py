"""The control of a rank: between two steps a process of its own, on the rank's cores, computes the
same small piece again and again.

Its time tells how fast the machine was at that moment, and nothing else: it must not depend on the
strategy, whose figures would bend with it. So it is a process, whose memory and allocator are not
the rank's; and while it computes the rank is stopped, with all its threads. Work that a step leaves
to them goes on in the next step, and counts there; what they do of it between the end of the
slowest rank's step and the stop, and after it, is told by their processor time, and is the step's
too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from harness.host.cores import threads_of
from harness.host.process import die_with_parent
from harness.strategy.registry import make_strategy
from harness.worker.batches import Batches
from harness.worker.spec import TrialSpec
from harness.workloads import make_workload

_REQUEST = struct.Struct("d")
_ANSWER = struct.Struct("dddd")
_MESSAGE = struct.Struct("iid")
OWN_SECONDS = 0.0005
"""Processor time in a pause up to this is taken for the waiting itself."""
_MALLOPT = {-1: 1 << 30, -3: 1 << 25}
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD in bytes; the latter is the most that glibc takes."""


@dataclass(frozen=True)
class Pause:
    """What happened between two steps."""

    control_seconds: float | None
    """Of the control: one sample's forward and backward; None of a rank that has none (see
    `Control`)."""
    left_over_seconds: float
    """Processor time that the rank's own threads used meanwhile, once the step of every rank was
    over: work that the step left behind. Before, a library waits for slower ranks, and may look for
    work without end."""
    control_cpu_seconds: float
    """Processor time of the control."""
    largest: float
    """The largest of the numbers that the ranks gave."""


class Control:
    """The control process of one rank. All ranks of a trial pause together: no control begins
    before the step of each rank is over, and none goes on before the control of each has ended.

    It computes once in each pause: a second time, its caches being warm, it is a seventh faster.
    A server, which has no cores of its own, is stopped like the others and computes nothing.
    """

    def __init__(self, spec: TrialSpec, rank: int, cores: tuple[int, ...]) -> None:
        """Forks the process; before the rank has any threads."""
        cell = spec.cell
        self.every = max(1, round(spec.samples_per_control * cell.devices / cell.global_batch))
        """Steps from one pause to the next."""
        self.serves = make_strategy(cell).layout(cell.devices).serves(rank)
        self.threads = threads_of(cell, cores)
        self.line, other = socket.socketpair()
        own = os.getpid()
        self.process = os.fork()
        if self.process == 0:
            self.line.close()
            die_with_parent()
            if os.getppid() != own:  # it died before the kernel was told
                os._exit(1)
            _serve(spec, rank, own, other, computes=not self.serves)
        other.close()

    def close(self) -> None:
        """Ends the process."""
        self.line.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.process, 0)

    def pause(self, number: float = 0.0) -> Pause:
        """Waits while the control computes; `number`: the ranks learn of the largest.

        Raises ConnectionError where the control process has died.
        """
        self.line.send(_REQUEST.pack(number))
        answer = self.line.recv(_ANSWER.size)
        if len(answer) != _ANSWER.size:
            raise ConnectionError("the control process of this rank has ended")
        seconds, cpu_seconds, largest, before = _ANSWER.unpack(answer)
        left_over = (time.process_time() - before) / self.threads
        left_over = left_over if left_over > OWN_SECONDS else 0.0
        # A thread at work is stopped a little late, and the control may have to wait for it.
        own = max(seconds - left_over, cpu_seconds)
        return Pause(None if self.serves else own, left_over, cpu_seconds, largest)


def _serve(
    spec: TrialSpec, rank: int, process: int, line: socket.socket, computes: bool
) -> NoReturn:
    """The control process: computes once for each request, where it does; ends with its rank, whose
    process id this is.

    It has a session of its own, which Linux schedules apart (autogroup, sched(7)). In its rank's it
    changes the order in which the rank's threads get the core afterwards: DDP's next step took 4 %
    less.
    """
    keep = line.detach()
    os.closerange(3, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
    line = socket.socket(fileno=keep)
    os.setsid()
    status = 1
    with contextlib.suppress(BaseException):
        others = _Others(Path(spec.scratch), rank, spec.processes)
        of_rank = _processor_clock(process)
        compute: Callable[[], None] | None = None
        while request := line.recv(_REQUEST.size):
            compute = compute or (_computation(spec, rank) if computes else lambda: None)
            (number,) = _REQUEST.unpack(request)
            largest = others.wait(number)
            before = time.clock_gettime(of_rank)
            with _stopped(process):
                began, cpu_began = time.perf_counter(), time.process_time()
                compute()
                seconds = time.perf_counter() - began
                cpu_seconds = time.process_time() - cpu_began
                others.wait(0.0)
                # Before the rank goes on: one of its threads may get the core first, and for long.
                line.send(_ANSWER.pack(seconds, cpu_seconds, largest, before))
        status = 0
    os._exit(status)


def _processor_clock(process: int) -> int:
    """The clock of the processor time of all threads of another process, by
    clock_getcpuclockid(3)."""
    clock = ctypes.c_int()
    if error := ctypes.CDLL(None).clock_getcpuclockid(process, ctypes.byref(clock)):
        raise OSError(error, os.strerror(error))
    return clock.value


@contextlib.contextmanager
def _stopped(process: int) -> Iterator[None]:
    """Stops this process and all its threads for a while: what runs in them, a library's included,
    neither slows the control down nor is done unseen."""
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def _keep_memory() -> None:
    """Lets the allocator keep what is freed. By thresholds that depend on what the process has
    freed before, glibc else gives it back to the kernel, and the control of one strategy has twice
    the page faults of another's (mallopt(3))."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for parameter, threshold in _MALLOPT.items():
            libc.mallopt(parameter, threshold)


def _computation(spec: TrialSpec, rank: int) -> Callable[[], None]:
    """Forward and backward of one sample of the cell's own workload."""
    import torch

    _keep_memory()
    torch.set_num_threads(threads_of(spec.cell, spec.cores[rank]))
    cell, device = spec.cell, torch.device("cpu")
    workload = make_workload(cell.workload)
    model = workload.build(cell.seed, device)
    batch = Batches(spec.data, cell.seed, 1, slice(0, 1), device).fetch(0)

    def compute() -> None:
        workload.loss(workload.logits(model, batch.inputs), batch.labels).backward()
        for parameter in model.parameters():
            parameter.grad = None

    compute()
    return compute


class _Others:
    """The control processes of a trial's other ranks."""

    def __init__(self, scratch: Path, rank: int, processes: int) -> None:
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.addresses = [str(scratch / f"control{restarts}.{r}") for r in range(processes)]
        self.rank = rank
        self.came: list[int] = [0] * processes
        """How often each has come here."""
        self.numbers: dict[tuple[int, int], float] = {}
        """Their numbers, by how often each had come and by rank."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.addresses[rank])

    def wait(self, number: float) -> float:
        """Returns when each has come here as often as this one; the largest of their numbers."""
        turn = self.came[self.rank] = self.came[self.rank] + 1
        self.numbers[turn, self.rank] = number
        for rank, address in enumerate(self.addresses):
            if rank != self.rank:
                _send(self.socket, _MESSAGE.pack(self.rank, turn, number), address)
        while min(self.came) < turn:
            rank, pauses, its_number = _MESSAGE.unpack(self.socket.recv(_MESSAGE.size))
            self.came[rank] = pauses
            self.numbers[pauses, rank] = its_number
        return max(self.numbers.pop((turn, rank)) for rank in range(len(self.came)))


def _send(line: socket.socket, message: bytes, address: str) -> None:
    """Sends to a process that may not listen yet."""
    while True:
        try:
            line.sendto(message, address)
            return
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.001)
