"""How much memory did a rank need at its peak?"""

from __future__ import annotations

import ctypes
import gc
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CPU_METHOD = "anonymous resident memory: high water above the baseline after imports"
CUDA_METHOD = "torch.cuda.max_memory_allocated; reserved by max_memory_reserved"


def _status() -> dict[str, int]:
    """Bytes by field of /proc/self/status (fields that end in kB)."""
    fields: dict[str, int] = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            fields[name] = int(value.split()[0]) * 1024
    return fields


@dataclass(frozen=True)
class Peak:
    """Peak memory of one rank in bytes; None where the host cannot say."""

    allocated: int | None
    reserved: int | None
    method: str


class MemoryMeter:
    """Peak memory of this process above its baseline.

    CPU: Linux keeps the high water of all resident memory (VmHWM), which counts pages of libraries too. Those only grow,
    so high water - file pages - shared pages at the end is the anonymous memory at the peak (or a little less); the
    anonymous memory at construction, after imports, is taken off. It costs nothing while steps run.
    CUDA: the caching allocator's own counters.
    """

    def __init__(self, device: torch.device, limit: int | None) -> None:
        self.device = device
        self.limit = limit
        self.method = CUDA_METHOD if device.type == "cuda" else CPU_METHOD
        if device.type == "cuda":
            import torch

            if limit is not None:
                total = torch.cuda.get_device_properties(device).total_memory
                torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
            return
        gc.collect()
        self._trim()
        status = _status()
        self.baseline = status["RssAnon"]
        if limit is not None:
            ceiling = status["VmData"] + limit
            resource.setrlimit(resource.RLIMIT_DATA, (ceiling, ceiling))
        self.usable = self.reset()

    @staticmethod
    def _trim() -> None:
        """Gives freed heap back to the kernel, so that what set-up used does not count as the steps' memory."""
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)

    def reset(self) -> bool:
        """Forgets the high water so far; False where the kernel does not allow it."""
        if self.device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(self.device)
            return True
        gc.collect()
        self._trim()
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def peak(self) -> Peak:
        """The peak since the last reset."""
        if self.device.type == "cuda":
            import torch

            return Peak(torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device), self.method)
        if not self.usable:
            return Peak(None, None, "unknown: the kernel does not reset VmHWM")
        status = _status()
        anonymous = status["VmHWM"] - status["RssFile"] - status["RssShmem"]
        return Peak(max(0, anonymous - self.baseline), None, self.method)


def imbalance(peaks: list[int]) -> float | None:
    """Largest over mean peak of the ranks; 1.0 is perfectly even."""
    mean = sum(peaks) / len(peaks) if peaks else 0
    return max(peaks) / mean if mean else None
