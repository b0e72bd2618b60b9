"""NVML, NVIDIA's management library, with typed answers.

Unlike CUDA, it leaves a process able to fork ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NewType

from harness.host.amd import rocm_version

Handle = NewType("Handle", object)
_MOST_STARTS = 1000
"""Maximum number of shutdowns tried, since libraries may have started NVML without ending it."""
_NO_DRIVER = (9, 12)
"""NVML's error codes for a driver that is not loaded, and for a missing library (nvml.h)."""


@dataclass(frozen=True)
class GpuProcess:
    pid: int
    memory_bytes: int | None


class Nvml:
    """A started NVML. Its methods return None for what it does not answer."""

    def __init__(self, pynvml: Any) -> None:
        self._pynvml = pynvml
        # Raised for functions that a library older than pynvml lacks.
        mismatch = getattr(pynvml, "NVMLLibraryMismatchError", pynvml.NVMLError)
        self._no_answer = (pynvml.NVMLError, mismatch)

    @classmethod
    def start(cls) -> Nvml | None:
        """Starts NVML. Returns None without its library or driver, and under ROCm."""
        if rocm_version():
            return None
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # pynvml has an exception class per error code
            return None
        return cls(pynvml)

    def close(self) -> None:
        with contextlib.suppress(self._pynvml.NVMLError):
            self._pynvml.nvmlShutdown()

    def offers(self, function: str) -> bool:
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
        """Converts an answer in milliwatts or millijoules to watts or joules."""
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
        """Decodes a set of numbers from 64-bit words, lowest bit first."""
        masks: Sequence[int] = self._ask(function, *arguments) or ()
        return tuple(i for i in range(64 * len(masks)) if int(masks[i // 64]) >> i % 64 & 1)

    def bus_id(self, function: str, *arguments: object) -> str | None:
        answer = self._ask(function, *arguments)
        return None if answer is None else _decoded(answer.busId)

    def memory(self, handle: Handle) -> tuple[int, int] | None:
        """Returns total memory, and memory used by all processes and the driver, in bytes."""
        answer = self._ask("nvmlDeviceGetMemoryInfo", handle)
        return None if answer is None else (int(answer.total), int(answer.used))

    def processes(self, handle: Handle) -> tuple[GpuProcess, ...] | None:
        answer = self._ask("nvmlDeviceGetComputeRunningProcesses", handle)
        if answer is None:
            return None
        sizes = [(int(process.pid), process.usedGpuMemory) for process in answer]
        return tuple(GpuProcess(pid, None if size is None else int(size)) for pid, size in sizes)

    def violation_seconds(self, handle: Handle, policy: str) -> float | None:
        """Returns the seconds since driver load in which a policy throttled the clocks.

        `policy`: name of a constant NVML_PERF_POLICY_*.
        """
        answer = self._ask("nvmlDeviceGetViolationStatus", handle, self.constant(policy))
        return None if answer is None else answer.violationTime / 1e9

    def whole_gpu(self, handle: Handle) -> tuple[Handle, bool]:
        """Returns a handle's physical GPU, and whether the handle is a slice."""
        parent = self.handle("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        return (handle, False) if parent is None else (parent, True)

    def is_divided(self, handle: Handle) -> bool:
        mode = self.pair("nvmlDeviceGetMigMode", handle)
        return mode is not None and mode[0] == self.constant("NVML_DEVICE_MIG_ENABLE")


@contextlib.contextmanager
def nvml() -> Iterator[Nvml | None]:
    """Starts NVML for the context; None without library or driver."""
    library = Nvml.start()
    try:
        yield library
    finally:
        if library is not None:
            library.close()


def why_nvml_fails() -> str:
    """Returns NVML's error if it does not start although there is a driver; empty otherwise."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # as in Nvml.start; pynvml may be missing
        absent = getattr(error, "value", None) in (None, *_NO_DRIVER)
        return "" if absent else str(error).rstrip(".")
    pynvml.nvmlShutdown()
    return ""


def end_nvml() -> None:
    """Shuts NVML down in this process, however often libraries have started it, since a forked
    child cannot use its connection."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # not loaded
        return
    for _ in range(_MOST_STARTS):
        if library.nvmlShutdown() != 0:
            return


def _decoded(answer: str | bytes) -> str:
    return answer.decode() if isinstance(answer, bytes) else str(answer)
