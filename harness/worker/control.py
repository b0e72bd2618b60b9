"""The control of a rank: between two steps a process of its own, on the rank's cores, computes the
same small piece again and again.

Its time tells how fast the machine was at that moment. It is a process, so that its memory and its
allocator are not the rank's, and so that work which a step leaves to the rank's own threads can be
told from it: the rank waits, and whatever processor time it uses in that pause is the step's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from harness.host.cores import threads_of
from harness.host.process import die_with_parent
from harness.worker.batches import Batches
from harness.worker.spec import TrialSpec
from harness.workloads import make_workload

_REQUEST = struct.Struct("di")
_ANSWER = struct.Struct("ddd")
_MESSAGE = struct.Struct("iid")
SAMPLES_PER_CONTROL = 4
"""The control runs once for so many samples of its rank."""
SHARE_OF_STEPS = 0.25
"""Of the steps' time that it takes, about; it runs several times where steps are long."""
MOST_REPEATS = 4
OWN_SECONDS = 0.0005
"""Processor time in a pause up to this is taken for the waiting itself."""


@dataclass(frozen=True)
class Pause:
    """What happened between two steps."""

    control_seconds: float
    """Of the control: one sample's forward and backward, mean of the repeats."""
    left_over_seconds: float
    """Processor time that the rank's own threads used meanwhile: work that the step left behind."""
    control_cpu_seconds: float
    """Processor time of all that the control computed."""
    largest: float
    """The largest of the numbers that the ranks gave."""


class Control:
    """The control process of one rank. All ranks of a trial pause together: none goes on before
    the control of each has ended."""

    def __init__(self, spec: TrialSpec, rank: int, cores: tuple[int, ...]) -> None:
        """Forks the process; before the rank has any threads."""
        cell = spec.cell
        self.every = max(1, round(SAMPLES_PER_CONTROL * cell.devices / cell.global_batch))
        """Steps from one pause to the next."""
        self.repeats = 1
        """Computations in a pause."""
        self.threads = threads_of(spec.cell, cores)
        self.line, other = socket.socketpair()
        own = os.getpid()
        self.process = os.fork()
        if self.process == 0:
            self.line.close()
            die_with_parent()
            if os.getppid() != own:  # it died before the kernel was told
                os._exit(1)
            _serve(spec, rank, other)
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
        before = time.process_time()
        self.line.send(_REQUEST.pack(number, self.repeats))
        answer = self.line.recv(_ANSWER.size)
        if len(answer) != _ANSWER.size:
            raise ConnectionError("the control process of this rank has ended")
        left_over = (time.process_time() - before) / self.threads
        left_over = left_over if left_over > OWN_SECONDS else 0.0
        seconds, cpu_seconds, largest = _ANSWER.unpack(answer)
        # What the rank's threads took of the same cores, the control had to wait for.
        own = max(seconds - left_over, cpu_seconds) / self.repeats
        return Pause(own, left_over, cpu_seconds, largest)

    def fit(self, step_seconds: float, control_seconds: float) -> None:
        """Lets it compute as often in a pause as makes up its share of the steps' time."""
        wanted = SHARE_OF_STEPS * self.every * step_seconds / max(control_seconds, 1e-6)
        self.repeats = max(1, min(MOST_REPEATS, round(wanted)))


def _serve(spec: TrialSpec, rank: int, line: socket.socket) -> NoReturn:
    """The control process: computes once for each request; ends with its rank."""
    keep = line.detach()
    os.closerange(3, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
    line = socket.socket(fileno=keep)
    status = 1
    with contextlib.suppress(BaseException):
        others = _Others(Path(spec.scratch), rank, spec.processes)
        compute: Callable[[], None] | None = None
        while request := line.recv(_REQUEST.size):
            compute = compute or _computation(spec, rank)
            number, repeats = _REQUEST.unpack(request)
            began, cpu_began = time.perf_counter(), time.process_time()
            for _ in range(repeats):
                compute()
            seconds = time.perf_counter() - began
            cpu_seconds = time.process_time() - cpu_began
            largest = others.wait(number)
            line.send(_ANSWER.pack(seconds, cpu_seconds, largest))
        status = 0
    os._exit(status)


def _computation(spec: TrialSpec, rank: int) -> Callable[[], None]:
    """Forward and backward of one sample of the cell's own workload."""
    import torch

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
