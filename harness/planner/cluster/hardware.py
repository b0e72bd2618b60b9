from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from pydantic import TypeAdapter

from harness.cell.errors import UsageError
from harness.host.gpu_models import TERA, GpuModel, gpu_named
from harness.planner.cluster.calibration import Floats, Ints
from harness.planner.cluster.device_rates import (
    USUAL_SHARE,
    WIRE_SHARE,
    best_products,
    bytes_per_second,
    inside_node,
)
from harness.planner.cluster.recipe import Precision

GIGA = 1e9
HOST_MEMORY_SHARE = 2.0
"""Host memory relative to the memory of a node's devices. The factor is assumed; DGX A100 and H100
have 3."""


@dataclass(frozen=True)
class Cluster:
    device: str
    flops_per_second: float
    """Dense peak in bf16; on devices without bf16, in fp16."""
    reached_flops_per_second: float
    """Rate of the device's best matrix product."""
    memory_bytes: float
    memory_bytes_per_second: float
    per_node: int
    reduce_bytes_per_second: float
    """Bus bandwidth of an all-reduce within a node: bytes across the slowest link (nccl-tests,
    PERFORMANCE.md)."""
    gather_bytes_per_second: float
    """Bus bandwidth of all-gather and reduce-scatter within a node."""
    wire_bytes_per_second: float | None
    """Rate from each device to other nodes in large collectives; None for a single node."""
    host_memory_bytes: float
    """Host memory per node."""
    switched: bool = True
    """Whether a device reaches any other device of its node over all its links, instead of over one
    link per pair."""
    links: str = ""
    host_bytes_per_second: float = 25e9
    """Rate between device and host memory, per direction."""
    disk_bytes_per_second: float = 3e9
    """Rate of a node's disks, shared by its devices."""
    disk_bytes: float = 30e12
    """Disk space per node."""
    measured: str = ""
    """Folder of the runs that measured the device's rates; empty if they are published ones."""

    @property
    def host_memory_assumed(self) -> bool:
        return self.host_memory_bytes == HOST_MEMORY_SHARE * self.memory_bytes * self.per_node

    @property
    def is_one_node(self) -> bool:
        return self.wire_bytes_per_second is None

    def bandwidth(
        self, inside: float, nodes: Ints, ranks_per_node: Ints, share: float = 1.0
    ) -> Floats:
        """Returns a collective's bus bandwidth in bytes per second (shape as `nodes`).

        `inside`: bandwidth among all devices of a node, an upper bound. `share`: fraction reached
        between nodes. With n ranks in k nodes, (k - 1) / (n - 1) of the bytes cross a device's
        link, as nodes reduce inside first (Bekman, 2026, see WIRE_SHARE). A node's groups use
        separate links.
        """
        wire = self.wire_bytes_per_second or inside
        pairs = np.maximum(1, ranks_per_node - 1) / max(1, self.per_node - 1)
        links = 1.0 if self.switched else pairs
        within = inside * links * np.ones(np.shape(nodes))
        across = wire * (nodes * ranks_per_node - 1) / np.maximum(1, nodes - 1)
        # One rank per node sends only between nodes.
        bound = np.where(ranks_per_node > 1, within, inside)
        across = np.minimum(bound, share * np.minimum(bound, across))
        result: Floats = np.where(nodes > 1, across, within)
        return result

    def computing_in(self, precision: Precision) -> Cluster:
        if precision != "fp32":
            return self
        peak = gpu_named(self.device).fp32_flops_per_second or self.flops_per_second / 8
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


def cluster_of(
    device: str, per_node: int, link: str, host_memory_bytes: float | None = None
) -> Cluster:
    """Returns a cluster of these devices and links.

    `link` is a name in hardware.yaml or `INSIDE,BETWEEN`: the link within a node (`inside_node`),
    and each device's rate to other nodes (`400gbit`), empty for a single node. `host_memory_bytes`:
    per node; if None, HOST_MEMORY_SHARE is assumed. Raises UsageError for an unknown device or
    link, or an impossible amount.
    """
    if per_node < 1:
        raise UsageError(f"devices per node is {per_node}; give at least 1")
    model = gpu_named(device)
    device = model.host_name
    peak = model.half_flops_per_second
    if host_memory_bytes is not None and host_memory_bytes < 1:
        raise UsageError(f"host memory is {host_memory_bytes:g} bytes; give more, such as 512GiB")
    reduce, gather, rate = _rates(model, per_node, link)
    return Cluster(
        device=device,
        flops_per_second=peak,
        reached_flops_per_second=best_products().get(device, USUAL_SHARE * peak / TERA) * TERA,
        memory_bytes=float(model.memory_bytes),
        memory_bytes_per_second=model.memory_bytes_per_second,
        per_node=per_node,
        reduce_bytes_per_second=reduce,
        gather_bytes_per_second=gather,
        wire_bytes_per_second=None if rate is None else WIRE_SHARE * rate,
        host_memory_bytes=(
            HOST_MEMORY_SHARE * model.memory_bytes * per_node
            if host_memory_bytes is None
            else host_memory_bytes
        ),
        switched=not (model.fabric_bytes_per_second and link.lower().startswith("nvlink")),
        links=link,
    )


def _rates(model: GpuModel, per_node: int, link: str) -> tuple[float, float, float | None]:
    """Returns three rates in bytes per second: of an all-reduce in a node, of gathers in a node,
    and from a device to other nodes."""
    if chosen := measured_links().get(link):
        return GIGA * chosen.reduce, GIGA * chosen.gather, GIGA * chosen.rate
    inner, _, outer = (part.strip() for part in link.lower().partition(","))
    inside, between = inside_node(model, per_node, inner), bytes_per_second(outer)
    if inside is None or (outer and between is None):
        raise UsageError(
            f"link {link!r} is not understood; write the link inside a node and the rate of each"
            f" device to other nodes, both above 0, such as nvlink,400gbit, or one of"
            f" {', '.join(measured_links())}"
        )
    return *inside, between
