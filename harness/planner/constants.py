"""The few constants that are fitted to measurements, with their meanings, units and bounds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Bounds:
    """What a constant may be, from physics and not from any measurement of a whole step."""

    low: float
    high: float
    prior: float
    """The value that is believed without data."""
    spread: float
    """Standard deviation of that belief."""
    unit: str
    meaning: str


def _constant(
    prior: float, low: float, high: float, spread: float, unit: str, meaning: str
) -> float:
    bounds = Bounds(low, high, prior, spread, unit, meaning)
    value: float = field(default=prior, metadata={"bounds": bounds})
    return value


@dataclass(frozen=True)
class TimeConstants:
    """Of the step time."""

    matmul_efficiency: float = _constant(
        0.8,
        0.5,
        1.0,
        0.08,
        "1",
        "share of what the device's best matrix product reaches that large products of a training"
        " reach",
    )
    matmul_half_size: float = _constant(
        1.5,
        0.3,
        6.0,
        0.7,
        "1",
        "a product of M x K by K x N takes 1 + this x ridge x (1/M + 1/N + 1/K) times as long as a"
        " large one: operands are read, and tiles are unfilled; ridge is the device's operations"
        " for each byte of its memory's bandwidth",
    )
    attention_efficiency: float = _constant(
        0.45, 0.15, 0.8, 0.1, "1", "share of the dense peak that fused attention reaches"
    )
    elementwise_passes: float = _constant(
        30.0,
        8.0,
        90.0,
        12.0,
        "1",
        "times that forward and backward of a layer read or write its activations of 2 bytes"
        " (hidden + feed-forward size for each token) outside of matrix products",
    )
    logit_bytes: float = _constant(
        30.0, 4.0, 90.0, 12.0, "bytes", "read and written per logit by the head's cast and the loss"
    )
    launch_layer: float = _constant(
        2.9e-3,
        0.3e-3,
        6e-3,
        0.8e-3,
        "s",
        "the processor's time to launch forward and backward of one layer",
    )
    launch_tensor: float = _constant(
        1.4e-3, 0.0, 5e-3, 0.8e-3, "s", "more of it where a layer's tensors are split"
    )
    pipeline_stall: float = _constant(
        2.0e-3,
        0.0,
        6e-3,
        1.0e-3,
        "s",
        "more of it for each rank of the tensor axis, in each layer, where a pipeline crosses"
        " nodes: collectives wait behind sends on the device's single launch queue",
    )
    tensor_latency: float = _constant(
        0.2e-3,
        0.005e-3,
        1e-3,
        0.1e-3,
        "s",
        "of a collective of tensor parallelism for each node beyond the first that it spans",
    )
    stall_growth: float = _constant(
        0.3,
        0.0,
        1.0,
        0.2,
        "1",
        "share by which that grows with each doubling of the nodes that the tensor axis spans",
    )
    tensor_exposed: float = _constant(
        0.8, 0.2, 1.0, 0.2, "1", "share of tensor-parallel communication that no compute hides"
    )
    network_bandwidth: float = _constant(
        1.0,
        0.3,
        3.0,
        0.4,
        "1",
        "bandwidth between nodes for the data axis's large messages, as a share of the curve's",
    )
    tensor_network: float = _constant(
        1.0, 0.3, 2.0, 0.3, "1", "the same for the tensor axis where it spans nodes"
    )
    data_overlap: float = _constant(
        0.5,
        0.0,
        1.0,
        0.25,
        "1",
        "share of the last backward pass that hides the reduction of gradients",
    )
    update_passes: float = _constant(
        40.0, 20.0, 120.0, 12.0, "bytes", "read and written for each parameter that a rank updates"
    )
    step_latency: float = _constant(
        0.03,
        0.0,
        0.2,
        0.015,
        "s",
        "of a step for each doubling of the nodes: its many small reductions, and the slowest rank",
    )


@dataclass(frozen=True)
class MemoryConstants:
    """Of the memory that the allocator takes from the device."""

    fragmentation: float = _constant(
        1.15,
        1.0,
        1.7,
        0.15,
        "1",
        "bytes reserved for each byte of activations: blocks do not fit what is asked for next",
    )
    layer_hidden: float = _constant(
        16.0,
        6.0,
        40.0,
        6.0,
        "bytes",
        "kept for the backward pass per token and element of the hidden size in each layer",
    )
    layer_feed: float = _constant(
        8.0, 4.0, 14.0, 1.5, "bytes", "the same per element of the feed-forward size"
    )
    gathered: float = _constant(
        4.0,
        0.0,
        16.0,
        3.0,
        "bytes",
        "the same per element of the hidden size that tensor parallelism does not split",
    )
    logit: float = _constant(
        10.0, 2.0, 24.0, 4.0, "bytes", "kept per logit of the micro-batch in its head"
    )
    bucket: float = _constant(
        2.0,
        0.0,
        6.0,
        1.5,
        "bytes",
        "a second copy of gradients in the buckets that are reduced, per parameter",
    )
    overhead: float = _constant(0.5, 0.0, 4.0, 0.5, "GB", "of workspaces that are always there")
    knee: float = _constant(
        0.8,
        0.5,
        1.0,
        0.1,
        "1",
        "share of the device's memory from which the allocator frees what it had reserved",
    )


def bounds_of(kind: type[TimeConstants] | type[MemoryConstants]) -> dict[str, Bounds]:
    """The bounds of each constant by its name."""
    return {f.name: f.metadata["bounds"] for f in dataclasses.fields(kind)}
