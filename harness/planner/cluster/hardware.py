from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from pydantic import TypeAdapter

from harness.host.gpu_models import TERA, GpuModel, gpu_models, gpu_named
from harness.planner.cluster.matrix_rates import USUAL_SHARE, best_products
from harness.planner.cluster.recipe import Precision
from harness.planner.fitting import Floats, Ints
from harness.spec.errors import UsageError

GIGA = 1e9
REDUCE_SHARE, GATHER_SHARE = 0.9, 0.55
"""Bus bandwidth relative to one direction of a node's links.

All-reduce: between 436 of 450 GB/s, measured on H100 nodes (Ultra-Scale Playbook), and 230 to 240
of 300 GB/s, usual on A100 nodes. Gathers: 250 of 450 GB/s, measured on H100 nodes (same source)."""
PCIE_BYTES_PER_SECOND = 32e9
"""One direction of PCI Express 4.0 x16 (PCI-SIG)."""
WIRE_SHARE = 0.73
"""Share of the rate between nodes in a large all-reduce: 36.5 of 50 GB/s per device for 4 GiB over
4 nodes of 8 B200 (S. Bekman, Machine Learning Engineering, chapter on networks, 2026)."""
SIZES = tuple(2**power for power in range(11))


@dataclass(frozen=True)
class BandwidthCurve:
    """Bus bandwidth of a collective over all devices, by number of nodes.

    It counts bytes across the slowest link (nccl-tests, PERFORMANCE.md).
    """

    nodes: tuple[int, ...]
    bytes_per_second: tuple[float, ...]

    def at(self, nodes: Ints) -> Floats:
        """Interpolates bytes per second on a log-log scale.

        Beyond the last point, the last three's slope continues, but never rises.
        """
        x, y = np.log2(np.array(self.nodes, float)), np.log2(np.array(self.bytes_per_second))
        asked = np.log2(np.maximum(nodes, 1))
        last = min(3, len(x))
        slope = min(0.0, float(np.polyfit(x[-last:], y[-last:], 1)[0])) if last > 1 else 0.0
        result: Floats = np.exp2(np.interp(asked, x, y) + slope * np.maximum(0.0, asked - x[-1]))
        return result


@dataclass(frozen=True)
class Cluster:
    device: str
    flops_per_second: float
    """Dense bf16 peak; fp16 on devices without bf16."""
    reached_flops_per_second: float
    """Rate of the device's best matrix product."""
    memory_bytes: float
    memory_bytes_per_second: float
    per_node: int
    reduce: BandwidthCurve
    """All-reduce bandwidth; the first point is within a node."""
    gather: BandwidthCurve
    """Bandwidth of all-gather and reduce-scatter."""
    links: str = ""
    host_bytes_per_second: float = 25e9
    """Rate between device and host memory, per direction."""
    disk_bytes_per_second: float = 3e9
    """Rate of a node's disks, shared by its devices."""
    host_memory_bytes: float = 2e12
    """Host memory per node."""
    disk_bytes: float = 30e12
    """Disk space per node."""

    def computing_in(self, precision: Precision) -> Cluster:
        if precision != "fp32":
            return self
        peak = gpu_models()[self.device].fp32_flops_per_second or self.flops_per_second / 8
        return dataclasses.replace(
            self, flops_per_second=peak, reached_flops_per_second=USUAL_SHARE * peak
        )


@dataclass(frozen=True)
class MeasuredLinks:
    """Published bandwidths of a cluster, in GB/s."""

    name: str
    source: str
    reduce: float
    gather: float
    rate: float
    """Rate of a device to other nodes."""


@functools.cache
def measured_links() -> dict[str, MeasuredLinks]:
    text = Path(__file__).parents[1].joinpath("hardware.yaml").read_text(encoding="utf-8")
    listed = TypeAdapter(list[MeasuredLinks]).validate_python(yaml.safe_load(text)["links"])
    return {links.name: links for links in listed}


def cluster_of(device: str, per_node: int, link: str) -> Cluster:
    """Returns a cluster of these devices and links.

    `link` is a name in hardware.yaml or `INSIDE,BETWEEN`: INSIDE is `nvlink`, `pcie` or a rate per
    device and direction (`450gbyte`), BETWEEN each device's rate to other nodes (`400gbit`).
    Otherwise raises UsageError.
    """
    if per_node < 1:
        raise UsageError(f"devices per node is {per_node}; give at least 1")
    model = gpu_named(device)
    device = model.host_name
    peak = model.bf16_flops_per_second or model.fp16_flops_per_second
    if not peak or not model.memory_bytes_per_second:
        raise UsageError(
            f"device {device!r} has no published peak or memory bandwidth; choose another"
        )
    reduce, gather = _curves(model, per_node, link)
    return Cluster(
        device=device,
        flops_per_second=peak,
        reached_flops_per_second=best_products().get(device, USUAL_SHARE * peak / TERA) * TERA,
        memory_bytes=float(model.memory_bytes),
        memory_bytes_per_second=model.memory_bytes_per_second,
        per_node=per_node,
        reduce=reduce,
        gather=gather,
        links=link,
    )


def _curves(model: GpuModel, per_node: int, link: str) -> tuple[BandwidthCurve, BandwidthCurve]:
    if chosen := measured_links().get(link):
        return (
            curve_of(GIGA * chosen.reduce, GIGA * chosen.rate, per_node),
            curve_of(GIGA * chosen.gather, GIGA * chosen.rate, per_node),
        )
    inner, _, outer = (part.strip() for part in link.lower().partition(","))
    if inner == "nvlink":
        if not model.nvlink_bytes_per_second:
            raise UsageError(f"device {model.host_name!r} has no NVLink; give pcie")
        one_way = model.nvlink_bytes_per_second / 2
    else:
        one_way = PCIE_BYTES_PER_SECOND if inner == "pcie" else _rate(inner, link)
    between = _rate(outer, link) if outer else None
    return (
        curve_of(REDUCE_SHARE * one_way, between, per_node),
        curve_of(GATHER_SHARE * one_way, between, per_node),
    )


def curve_of(inside: float, rate: float | None, per_node: int) -> BandwidthCurve:
    """Returns a collective's bandwidth, given `inside` bytes per second within a node.

    `rate` is each device's to other nodes; None means a single node. Nodes first reduce or gather
    inside, so with n ranks in k nodes (k - 1) / (n - 1) of the bytes cross a device's link (Bekman,
    2026, see WIRE_SHARE).
    """
    if rate is None:
        return BandwidthCurve((1,), (inside,))
    wire = WIRE_SHARE * rate
    outside = [min(inside, wire * (k * per_node - 1) / (k - 1)) for k in SIZES[1:]]
    return BandwidthCurve(SIZES, (inside, *outside))


def _rate(text: str, link: str) -> float:
    """Parses `400gbit` or `450gbyte` into bytes per second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(gbit|mbit|gbyte)", text)
    rates = {"gbit": 1e9 / 8, "mbit": 1e6 / 8, "gbyte": 1e9}
    if match and float(match[1]) == 0:
        raise UsageError(f"link {link!r} has a rate of 0; give rates above 0")
    if not match:
        raise UsageError(
            f"link {link!r} is not understood; write the link inside a node and the rate of each"
            f" device to other nodes, such as nvlink,400gbit, or one of"
            f" {', '.join(measured_links())}"
        )
    return float(match[1]) * rates[match[2]]
