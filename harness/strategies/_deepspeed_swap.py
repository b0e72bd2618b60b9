"""DeepSpeed's offload to disk: swap units and locked memory."""

from __future__ import annotations

import math
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.spec.errors import Unavailable

Place = Literal["none", "cpu", "nvme"]
SWAPPED_BYTES = 2**20
"""Smallest tensor in bytes that DeepSpeed swaps, whatever the config says."""
SWAP_ELEMENTS = 2**20
"""Elements of the optimizer swapped at a time; DeepSpeed's default of 1e9 would buffer all of them
in memory."""
SWAP_BUFFERS = 5
"""Number of buffers through which parameters are swapped."""
ALIGNED_BYTES = 1024
_CAP_IPC_LOCK = 14
"""Bit of this Linux capability (linux/capability.h)."""


@dataclass(frozen=True)
class Swapping:
    """Inputs that determine a rank's disk buffers."""

    sizes: Sequence[int]
    """Elements of each trained parameter, unsharded."""
    ranks: int
    """Number of ranks that shard each parameter."""
    width: int
    """Bytes per parameter element."""
    optimizer: Place
    parameters: Place

    @property
    def parts(self) -> list[int]:
        """Elements of this rank's part of each parameter."""
        return [-(-size // self.ranks) for size in self.sizes]

    @property
    def groups(self) -> list[list[int]]:
        """Parts in consecutive sub-groups, each updated at once and full at SWAP_ELEMENTS."""
        groups: list[list[int]] = [[]]
        for part in self.parts:
            if sum(groups[-1]) >= SWAP_ELEMENTS:
                groups.append([])
            groups[-1].append(part)
        return groups

    @property
    def optimizer_buffer_bytes(self) -> int:
        """Bytes of the optimizer's swap buffers: four of the largest sub-group; 0 if not on
        disk."""
        if self.optimizer != "nvme":
            return 0
        return 4 * 4 * _aligned(max(sum(group) for group in self.groups), 4)

    @property
    def parameter_buffer_bytes(self) -> int:
        """Bytes of swap buffers for parameters and a sub-group's updates; 0 if not on disk.

        They are sized for whole parameters, although a rank writes only its parts.
        """
        if self.parameters != "nvme":
            return 0
        buffers = SWAP_BUFFERS * _aligned(largest_part(self.sizes, self.ranks), self.width)
        updated = sum(_aligned(size, self.width) for size in self._largest_group())
        return self.width * (buffers + updated)

    def _largest_group(self) -> Sequence[int]:
        """Returns parameter sizes in the first largest sub-group."""
        groups = self.groups
        largest = max(range(len(groups)), key=lambda i: sum(groups[i]))
        before = sum(len(group) for group in groups[:largest])
        return self.sizes[before : before + len(groups[largest])]


def largest_part(sizes: Sequence[int], ranks: int) -> int:
    """Returns elements of a rank's largest part; a generous bound if sizes are unknown."""
    return max((-(-size // ranks) for size in sizes), default=10**8)


def _aligned(elements: int, width: int) -> int:
    step = ALIGNED_BYTES // width
    return -(-elements // step) * step


def require_locked(swapping: Swapping) -> None:
    """Raises Unavailable if a rank may not lock (mlock) its swap buffers.

    DeepSpeed does not check whether locking failed and writes to an invalid address.
    """
    size = swapping.optimizer_buffer_bytes + swapping.parameter_buffer_bytes
    allowed = lockable_bytes()
    if size > allowed:
        raise Unavailable(
            f"DeepSpeed locks {size / 2**20:.1f} MiB of each rank's memory for its disk buffers,"
            f" and a process may lock {allowed / 2**20:.1f} MiB: ulimit -l unlimited (memlock in"
            " /etc/security/limits.conf; docker run --ulimit memlock=-1)"
        )


def lockable_bytes() -> float:
    """Returns the bytes a process may lock; unlimited with CAP_IPC_LOCK, which root has."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    capabilities = next(
        (int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0
    )
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return (
        math.inf if capabilities >> _CAP_IPC_LOCK & 1 or limit == resource.RLIM_INFINITY else limit
    )
