"""Devices, nodes and the links between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.planner.layouts import Floats, Ints


@dataclass(frozen=True)
class Curve:
    """Bus bandwidth of a collective over all devices of some nodes.

    Bus bandwidth is NCCL's: bytes that cross the slowest link, whatever the number of ranks
    (nccl-tests, PERFORMANCE.md).
    """

    nodes: tuple[int, ...]
    bytes_per_second: tuple[float, ...]

    def at(self, nodes: Ints) -> Floats:
        """Interpolated on both logarithms; beyond the last point by the slope of the last three."""
        x, y = np.log2(np.array(self.nodes, float)), np.log2(np.array(self.bytes_per_second))
        asked = np.log2(np.maximum(nodes, 1))
        inside = np.interp(asked, x, y)
        if len(x) < 2:
            return np.exp2(inside)
        last = min(3, len(x))
        slope = min(0.0, float(np.polyfit(x[-last:], y[-last:], 1)[0]))
        return np.exp2(inside + slope * np.maximum(0.0, asked - x[-1]))


@dataclass(frozen=True)
class Cluster:
    """Equal devices in equal nodes."""

    device: str
    flops_per_second: float
    """Dense peak in the precision of the products."""
    memory_bytes: float
    memory_bytes_per_second: float
    per_node: int
    reduce: Curve
    """All-reduce; its first point is inside a node."""
    gather: Curve
    """All-gather and reduce-scatter."""
    host_bytes_per_second: float = 25e9
    """Between a device and its host's memory, each direction."""
    disk_bytes_per_second: float = 3e9
    """Of a node's disks, all its devices together."""
    host_memory_bytes: float = 1e12
    """Of a node."""
