"""NVML, NVIDIA's management library, with typed answers.

The GPUs are asked about through NVML and never through CUDA: a process that has initialised CUDA
cannot fork ranks any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NewType

Handle = NewType("Handle", object)
"""NVML's name for a GPU, or for a MIG slice of one."""


_MOST_STARTS = 1000
"""Starts of NVML that one process can have left open; the limit ends a loop over a broken
library."""


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU."""

    pid: int
    memory_bytes: int | None
    """None where the driver hides it."""


class Nvml:
    """NVML after its start.

    `function` is the name of a function of the Python package pynvml. Every method returns None
    where the GPU, the driver or the permissions of this process do not allow an answer.
    """

    def __init__(self, pynvml: Any) -> None:
        self._pynvml = pynvml
        # The second is raised for a function that a library older than pynvml does not have.
        mismatch = getattr(pynvml, "NVMLLibraryMismatchError", pynvml.NVMLError)
        self._no_answer = (pynvml.NVMLError, mismatch)

    @classmethod
    def start(cls) -> Nvml | None:
        """None where the host has no library or no driver."""
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # pynvml has an exception class for each of NVML's error codes
            return None
        return cls(pynvml)

    def close(self) -> None:
        with contextlib.suppress(self._pynvml.NVMLError):
            self._pynvml.nvmlShutdown()

    def offers(self, function: str) -> bool:
        """Whether the installed pynvml has this function."""
        return hasattr(self._pynvml, function)

    def constant(self, name: str) -> int:
        return int(getattr(self._pynvml, name))

    def _ask(self, function: str, *arguments: object) -> Any:
        try:
            return getattr(self._pynvml, function)(*arguments)
        except self._no_answer:
            return None

    def number(self, function: str, *arguments: object) -> int | None:
        answer = self._ask(function, *arguments)
        return None if answer is None else int(answer)

    def thousandths(self, function: str, *arguments: object) -> float | None:
        """An answer in milliwatts or millijoules, in watts or joules."""
        answer = self._ask(function, *arguments)
        return None if answer is None else answer / 1000

    def pair(self, function: str, *arguments: object) -> tuple[int, int] | None:
        answer = self._ask(function, *arguments)
        return None if answer is None else (int(answer[0]), int(answer[1]))

    def text(self, function: str, *arguments: object) -> str | None:
        answer = self._ask(function, *arguments)
        return None if answer is None else _decoded(answer)

    def handle(self, function: str, *arguments: object) -> Handle | None:
        answer = self._ask(function, *arguments)
        return None if answer is None else Handle(answer)

    def members(self, function: str, *arguments: object) -> tuple[int, ...]:
        """An answer that is a set of numbers, given as the bits of 64-bit words, lowest word first;
        empty where it is unknown."""
        words: Sequence[int] = self._ask(function, *arguments) or ()
        return tuple(i for i in range(64 * len(words)) if int(words[i // 64]) >> i % 64 & 1)

    def bus_id(self, function: str, *arguments: object) -> str | None:
        """The PCI bus id in an answer that is a nvmlPciInfo_t."""
        answer = self._ask(function, *arguments)
        return None if answer is None else _decoded(answer.busId)

    def memory(self, handle: Handle) -> tuple[int, int] | None:
        """Bytes of memory that there are, and that all processes and the driver have taken."""
        answer = self._ask("nvmlDeviceGetMemoryInfo", handle)
        return None if answer is None else (int(answer.total), int(answer.used))

    def processes(self, handle: Handle) -> tuple[GpuProcess, ...] | None:
        """The processes that compute on a GPU or slice."""
        answer = self._ask("nvmlDeviceGetComputeRunningProcesses", handle)
        if answer is None:
            return None
        sizes = [(int(process.pid), process.usedGpuMemory) for process in answer]
        return tuple(GpuProcess(pid, None if size is None else int(size)) for pid, size in sizes)

    def violation_seconds(self, handle: Handle, policy: str) -> float | None:
        """Seconds since the driver was loaded in which a performance policy, one of NVML's
        constants NVML_PERF_POLICY_*, held the clocks back."""
        answer = self._ask("nvmlDeviceGetViolationStatus", handle, self.constant(policy))
        return None if answer is None else answer.violationTime / 1e9

    def whole_gpu(self, handle: Handle) -> tuple[Handle, bool]:
        """The GPU that a handle is for, and whether the handle is for a MIG slice of it."""
        parent = self.handle("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        return (handle, False) if parent is None else (parent, True)

    def is_divided(self, handle: Handle) -> bool:
        """Whether a GPU is in MIG mode, in which only its slices can be used."""
        mode = self.pair("nvmlDeviceGetMigMode", handle)
        return mode is not None and mode[0] == self.constant("NVML_DEVICE_MIG_ENABLE")


@contextlib.contextmanager
def nvml() -> Iterator[Nvml | None]:
    """NVML between its start and its end; None where the host has no library or no driver."""
    library = Nvml.start()
    try:
        yield library
    finally:
        if library is not None:
            library.close()


def end_nvml() -> None:
    """Ends NVML in this process, however often its libraries have started it.

    A process that is about to fork calls this: NVML's connection to the driver does not work in the
    child, and a start there only counts one more user of it. torch starts NVML when it is asked
    whether there is a GPU, and never ends it.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # nothing has loaded it
        return
    for _ in range(_MOST_STARTS):
        if library.nvmlShutdown() != 0:
            return


def _decoded(answer: str | bytes) -> str:
    return answer.decode() if isinstance(answer, bytes) else str(answer)
