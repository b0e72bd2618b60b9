from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


CPU_METHOD = "anonymous resident memory: high water above the baseline after imports"
CUDA_METHOD = "torch.cuda.max_memory_allocated; reserved by max_memory_reserved"


def _status() -> dict[str, int]:
    fields: dict[str, int] = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            fields[name] = int(value.split()[0]) * 1024
    return fields


def _stacks() -> int:
    """Returns bytes of thread stacks, including cached stacks: anonymous writable mappings of a
    stack's size."""
    size = resource.getrlimit(resource.RLIMIT_STACK)[0]
    if size == resource.RLIM_INFINITY:
        size = 2 * 2**20
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, device, *_ = line.split()
        first, _, last = addresses.partition("-")
        if rights == "rw-p" and device == "00:00" and int(last, 16) - int(first, 16) == size:
            total += size
    return total


@dataclass(frozen=True)
class Peak:
    """Peak memory of one rank in bytes."""

    allocated: int | None
    """Peak allocated bytes, on the device with the most."""
    reserved: int | None
    """Peak bytes held by the CUDA caching allocator, on the device with the most."""
    method: str
    host: int | None = None
    """A GPU rank's resident memory without file pages, above the baseline after imports; includes
    resident pinned pages."""
    by_device: tuple[int, ...] = ()
    """Peak allocated bytes on each of the process's GPUs; empty on CPUs."""


class MemoryMeter:
    """Peak memory of this process above its baseline after imports.

    CPU: peak resident memory (VmHWM) minus file and shared pages at the end. These only grow, so
    this is the peak anonymous memory or slightly less. CUDA: the caching allocator's counters per
    device, and host memory.
    """

    def __init__(
        self,
        device: torch.device,
        limit: int | None,
        devices: Sequence[torch.device] | None = None,
    ) -> None:
        """`limit`: bytes; on GPUs, per device. `devices`: all of this process."""
        self.device = device
        self.devices = tuple(devices or (device,))
        self.limit = limit
        self.method = CUDA_METHOD if device.type == "cuda" else CPU_METHOD
        self.fractions: dict[torch.device, float] = {}
        self.before: tuple[int, int] | None = None
        self.reserve: bytearray | None = None
        self.at_limit: tuple[int, int] | None = None
        self.stacks_before = 0
        if device.type == "cuda":
            import torch

            if limit is not None:
                for gpu in self.devices:
                    total = torch.cuda.get_device_properties(gpu).total_memory
                    self.fractions[gpu] = min(1.0, limit / total)
                    torch.cuda.set_per_process_memory_fraction(self.fractions[gpu], gpu)
            gc.collect()
            self._trim()
            self.host_baseline = _without_files(_status())
            self.usable = self._reset_host()
            return
        gc.collect()
        self._trim()
        self.reserve = None if limit is None else bytearray(4 * 2**20)
        status = _status()
        self.baseline, self.mapped = status["RssAnon"], status["VmData"]
        if limit is not None:
            self._give_pages_back()
            self.stacks_before = _stacks()
            self.before = resource.getrlimit(resource.RLIMIT_DATA)
            self.ceiling = (self.mapped + limit, self.before[1])
            resource.setrlimit(resource.RLIMIT_DATA, self.ceiling)
        self.usable = self.reset()

    @staticmethod
    def _give_pages_back() -> None:
        """Makes glibc map tensors from 128 KiB separately, so that freeing one returns its pages.

        By default the threshold grows to 32 MiB, and the limit would measure fragmentation.
        """
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(-3, 128 * 1024)  # M_MMAP_THRESHOLD

    def lift(self) -> None:
        """Removes a CPU memory limit, so that a rank that hit it can report. From then on, `in_use`
        and `stacks` stay as they were: other threads may go on."""
        self.reserve = None
        if self.before is not None:
            self.at_limit = self.in_use(), self.stacks()
            resource.setrlimit(resource.RLIMIT_DATA, self.before)

    @contextlib.contextmanager
    def unlimited(self) -> Iterator[None]:
        """Lifts the limit within the context, for the harness's own work."""
        if self.fractions:
            import torch

            for gpu in self.fractions:
                torch.cuda.set_per_process_memory_fraction(1.0, gpu)
            yield
            torch.cuda.empty_cache()
            for gpu, fraction in self.fractions.items():
                torch.cuda.set_per_process_memory_fraction(fraction, gpu)
        elif self.before is not None:
            resource.setrlimit(resource.RLIMIT_DATA, self.before)
            yield
            gc.collect()
            self._trim()
            resource.setrlimit(resource.RLIMIT_DATA, self.ceiling)
        else:
            yield

    def in_use(self) -> int:
        """Returns the bytes counted against the limit, on the fullest device.

        CPU: bytes mapped since the imports, resident or not.
        """
        if self.device.type == "cuda":
            import torch

            return max(torch.cuda.memory_allocated(gpu) for gpu in self.devices)
        return self.at_limit[0] if self.at_limit else _status()["VmData"] - self.mapped

    def stacks(self) -> int:
        """Returns the bytes of `in_use` that are stacks of threads started later. They are mostly
        not resident."""
        if self.device.type == "cuda":
            return 0
        return self.at_limit[1] if self.at_limit else _stacks() - self.stacks_before

    @staticmethod
    def _trim() -> None:
        """Returns freed memory to the kernel. Otherwise setup's memory would count in the steps."""
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)

    def reset(self) -> bool:
        """Forgets the peak; returns False if the kernel forbids it."""
        if self.device.type == "cuda":
            import torch

            for gpu in self.devices:
                torch.cuda.reset_peak_memory_stats(gpu)
        return self._reset_host()

    def _reset_host(self) -> bool:
        gc.collect()
        self._trim()
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def _host_peak(self) -> int | None:
        if not self.usable:
            return None
        status = _status()
        return max(0, status["VmHWM"] - status["RssFile"] - self.host_baseline)

    def peak(self) -> Peak:
        if self.device.type == "cuda":
            import torch

            by_device = tuple(torch.cuda.max_memory_allocated(gpu) for gpu in self.devices)
            reserved = max(torch.cuda.max_memory_reserved(gpu) for gpu in self.devices)
            return Peak(max(by_device), reserved, self.method, self._host_peak(), by_device)
        if not self.usable:
            return Peak(None, None, "unknown: the kernel does not reset VmHWM")
        status = _status()
        anonymous = status["VmHWM"] - status["RssFile"] - status["RssShmem"]
        return Peak(max(0, anonymous - self.baseline), None, self.method)


def _without_files(status: dict[str, int]) -> int:
    return status["RssAnon"] + status["RssShmem"]


def imbalance(peaks: list[int]) -> float | None:
    """Returns the largest peak over the ranks' mean; None if all are 0."""
    mean = sum(peaks) / len(peaks) if peaks else 0
    return max(peaks) / mean if mean else None
