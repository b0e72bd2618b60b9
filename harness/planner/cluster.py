"""Devices, nodes and the links between them."""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from pydantic import TypeAdapter

from harness.host.gpu_models import GpuModel, gpu_models
from harness.planner.layouts import Floats, Ints
from harness.spec.errors import UsageError

GIGA = 1e9
TERA = 1e12
USUAL_SHARE = 0.8
"""Of its peak that a device's best product reaches where nobody has measured it."""
REDUCE_SHARE, GATHER_SHARE = 0.9, 0.55
"""Bus bandwidth over one direction of a node's own links: 436 and 250 of 450 GB/s were measured on
H100 nodes (Ultra-Scale Playbook), 230 to 240 of 300 GB/s is common for all-reduce on A100 nodes."""
PCIE_BYTES_PER_SECOND = 32e9
"""One direction of PCI Express 4.0 with 16 lanes (PCI-SIG)."""
REFERENCE_RATE = 50e9
"""Of each device to other nodes on the cluster whose curve is scaled to others: 400 Gbit/s."""


@dataclass(frozen=True)
class Curve:
    """Bus bandwidth of a collective over all devices of some nodes.

    Bus bandwidth is NCCL's: bytes that cross the slowest link, whatever the number of ranks
    (nccl-tests, PERFORMANCE.md).
    """

    nodes: tuple[int, ...]
    bytes_per_second: tuple[float, ...]

    def at(self, nodes: Ints) -> Floats:
        """Interpolated on both logarithms; beyond the last point by the slope of the last three,
        which never rises."""
        x, y = np.log2(np.array(self.nodes, float)), np.log2(np.array(self.bytes_per_second))
        asked = np.log2(np.maximum(nodes, 1))
        last = min(3, len(x))
        slope = min(0.0, float(np.polyfit(x[-last:], y[-last:], 1)[0])) if last > 1 else 0.0
        result: Floats = np.exp2(np.interp(asked, x, y) + slope * np.maximum(0.0, asked - x[-1]))
        return result


@dataclass(frozen=True)
class Cluster:
    """Equal devices in equal nodes."""

    device: str
    flops_per_second: float
    """Dense peak in bf16, or in fp16 where the device has no bf16."""
    reached_flops_per_second: float
    """Of the device's best matrix product, measured."""
    memory_bytes: float
    memory_bytes_per_second: float
    per_node: int
    reduce: Curve
    """All-reduce; its first point is inside a node."""
    gather: Curve
    """All-gather and reduce-scatter."""
    links: str = ""
    """In words."""
    host_bytes_per_second: float = 25e9
    """Between a device and its host's memory, each direction."""
    disk_bytes_per_second: float = 3e9
    """Of a node's disks, all its devices together."""
    host_memory_bytes: float = 2e12
    """Of a node, for what is offloaded."""
    disk_bytes: float = 30e12
    """Of a node."""


@dataclass(frozen=True)
class MeasuredLinks:
    """A cluster's curves as somebody has measured and published them."""

    name: str
    source: str
    nodes: tuple[int, ...]
    reduce: tuple[float, ...]
    """GB/s."""
    gather: tuple[float, ...]
    """GB/s."""


@functools.cache
def measured_links() -> dict[str, MeasuredLinks]:
    """The measured curves by name, from hardware.yaml."""
    text = Path(__file__).with_name("hardware.yaml").read_text(encoding="utf-8")
    listed = TypeAdapter(list[MeasuredLinks]).validate_python(yaml.safe_load(text)["links"])
    return {links.name: links for links in listed}


@functools.cache
def _reached() -> dict[str, float]:
    """TFLOP/s of each device's best matrix product, from hardware.yaml."""
    text = Path(__file__).with_name("hardware.yaml").read_text(encoding="utf-8")
    table = TypeAdapter(dict[str, float])
    return table.validate_python(yaml.safe_load(text)["best_products"])


def device_named(name: str) -> GpuModel:
    """A device of the table; raises UsageError with the nearest names for any other."""
    models = gpu_models()
    if name not in models:
        near = difflib.get_close_matches(name, models, 3, 0.4) or list(models)
        raise UsageError(f"device {name!r} is not in the table; nearest are {', '.join(near)}")
    return models[name]


def cluster_of(device: str, per_node: int, link: str) -> Cluster:
    """The cluster of a device's name, devices per node, and a text for its links.

    The text is a name of hardware.yaml, or the link inside a node (`nvlink`, `pcie` or a rate of
    each device and direction, such as `450gbyte`), a comma, and the rate of each device to other
    nodes (`400gbit`). Raises UsageError for anything else.
    """
    if per_node < 1:
        raise UsageError(f"devices per node is {per_node}; give at least 1")
    model = device_named(device)
    peak = model.bf16_flops_per_second or model.fp16_flops_per_second
    if not peak or not model.memory_bytes_per_second:
        raise UsageError(f"device {device!r}: its peak or its memory's bandwidth is not published")
    reduce, gather = _curves(model, per_node, link)
    return Cluster(
        device=device,
        flops_per_second=peak,
        reached_flops_per_second=_reached().get(device, USUAL_SHARE * peak / TERA) * TERA,
        memory_bytes=float(model.memory_bytes),
        memory_bytes_per_second=model.memory_bytes_per_second,
        per_node=per_node,
        reduce=reduce,
        gather=gather,
        links=link,
    )


def _curves(model: GpuModel, per_node: int, link: str) -> tuple[Curve, Curve]:
    known = measured_links()
    if link in known:
        chosen = known[link]
        return (
            Curve(chosen.nodes, tuple(GIGA * value for value in chosen.reduce)),
            Curve(chosen.nodes, tuple(GIGA * value for value in chosen.gather)),
        )
    inner, _, outer = (part.strip() for part in link.lower().partition(","))
    if inner == "nvlink":
        if not model.nvlink_bytes_per_second:
            raise UsageError(f"device {model.host_name!r} has no NVLink of its own; give pcie")
        one_way = model.nvlink_bytes_per_second / 2
    else:
        one_way = PCIE_BYTES_PER_SECOND if inner == "pcie" else _rate(inner, link)
    inside = (REDUCE_SHARE * one_way, GATHER_SHARE * one_way)
    if not outer:
        return Curve((1,), inside[:1]), Curve((1,), inside[1:])
    # No two networks are alike; the measured one's fall with more nodes is scaled by the rate.
    shape = next(iter(known.values()))
    scale = GIGA * (_rate(outer, link) / REFERENCE_RATE) * (per_node / 8)

    def scaled(first: float, measured: tuple[float, ...]) -> Curve:
        rest = tuple(min(first, scale * value) for value in measured[1:])
        return Curve(shape.nodes, (first, *rest))

    return scaled(inside[0], shape.reduce), scaled(inside[1], shape.gather)


def _rate(text: str, link: str) -> float:
    """Bytes per second of `400gbit` or `450gbyte`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(gbit|mbit|gbyte)", text)
    rates = {"gbit": 1e9 / 8, "mbit": 1e6 / 8, "gbyte": 1e9}
    if not match or float(match[1]) <= 0:
        raise UsageError(
            f"link {link!r} is not understood; write the link inside a node and the rate of each"
            f" device to other nodes, such as nvlink,400gbit, or one of"
            f" {', '.join(measured_links())}"
        )
    return float(match[1]) * rates[match[2]]
