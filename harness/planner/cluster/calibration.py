from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from scipy.special import ndtr, ndtri

from harness.cell.errors import UsageError, first_error
from harness.cell.yaml_text import parse_yaml
from harness.planner.cluster.anchor import Anchor
from harness.planner.cluster.recipe import PROGRAMS

DEFAULT = Path(__file__).parents[1].joinpath("calibration.yaml")
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

LEVEL = 0.8
"""Coverage of the 80% intervals."""


@dataclass(frozen=True)
class Prior:
    """Expected value without data, and physical bounds."""

    value: float
    spread: float
    low: float
    high: float
    unit: str


def constant(prior: Prior, meaning: str, source: str) -> float:
    """Declares a fitted field; `source` is where prior and bounds come from."""
    metadata = {"prior": prior, "meaning": meaning, "source": source}
    value: float = field(default=prior.value, metadata=metadata)
    return value


def priors_of(kind: type) -> dict[str, Prior]:
    return {f.name: f.metadata["prior"] for f in dataclasses.fields(kind)}


@dataclass(frozen=True)
class TimeConstants:
    matmul_efficiency: float = constant(
        Prior(0.8, spread=0.08, low=0.5, high=1.0, unit="1"),
        "rate of a training's large matrix products, as a share of the device's best product",
        "searches for the best product choose its sizes; a training cannot (hardware.yaml)",
    )
    matmul_half_size: float = constant(
        Prior(1.5, spread=0.7, low=0.3, high=6.0, unit="1"),
        "a product of M x K by K x N takes 1 + this x ridge x (1/M + 1/N + 1/K) times as long as a"
        " large one: operands are read, and tiles are unfilled; ridge is the device's operations"
        " per byte of memory bandwidth",
        "roofline: 1 reads the operands once (Williams and others, CACM 2009)",
    )
    attention_efficiency: float = constant(
        Prior(0.45, spread=0.1, low=0.15, high=0.8, unit="1"),
        "share of the dense peak that fused attention reaches",
        "FlashAttention-2, arXiv 2307.08691, figures 4 to 7; lower at short sequences",
    )
    elementwise_passes: float = constant(
        Prior(30.0, spread=12.0, low=8.0, high=90.0, unit="1"),
        "reads and writes of a layer's 2-byte activations (hidden + feed-forward size per token)"
        " outside matrix products, forward and backward",
        "count of the reads and writes of unfused norms, rotations, activations, residuals",
    )
    logit_bytes: float = constant(
        Prior(30.0, spread=12.0, low=4.0, high=90.0, unit="bytes"),
        "traffic per logit of the head's cast and the loss",
        "count: bf16 logits to fp32, softmax, loss and gradient",
    )
    launch_layer: float = constant(
        Prior(2.0e-3, spread=1.5e-3, low=0.3e-3, high=6e-3, unit="s"),
        "the processor's time to launch forward and backward of one layer",
        "some 200 kernels of a layer at 5 to 15 microseconds each",
    )
    launch_tensor: float = constant(
        Prior(1.0e-3, spread=1.0e-3, low=0.0, high=5e-3, unit="s"),
        "extra time to launch a layer whose tensors are split over ranks",
        "some 20 collectives and copies of a layer at 50 to 70 microseconds each",
    )
    launch_sharpness: float = constant(
        Prior(4.0, spread=1.5, low=1.5, high=12.0, unit="1"),
        "exponent of the smooth maximum of device and processor time: 1 adds them, a large one"
        " takes the longer; a layer has kernels longer and shorter than their launch",
        "assumed; at equal times 4 gives a time 19% longer than either",
    )
    pipeline_stall: float = constant(
        Prior(1.0e-3, spread=1.5e-3, low=0.0, high=6e-3, unit="s"),
        "additional time to launch a layer, for each rank of the tensor axis, if a pipeline"
        " crosses nodes: collectives wait behind sends on the device's single launch queue",
        "measured runs of nanotron; taken as zero on other clusters (Calibration.time_on)",
    )
    tensor_latency: float = constant(
        Prior(0.1e-3, spread=0.2e-3, low=0.005e-3, high=1e-3, unit="s"),
        "latency of a tensor-parallel collective for each node beyond the first that it spans",
        "latency of collectives between nodes, nccl-tests at small messages",
    )
    stall_growth: float = constant(
        Prior(0.3, spread=0.2, low=0.0, high=1.0, unit="1"),
        "growth of pipeline_stall with each doubling of the tensor axis's nodes",
        "assumed",
    )
    tensor_exposed: float = constant(
        Prior(0.8, spread=0.2, low=0.2, high=1.0, unit="1"),
        "share of tensor-parallel communication that compute does not hide",
        "nothing to everything may be hidden; asynchronous products hide some",
    )
    network_bandwidth: float = constant(
        Prior(0.9, spread=0.2, low=0.3, high=1.3, unit="1"),
        "bandwidth between nodes for the data axis's large messages, as a share of the curve's",
        "the curve is of an undisturbed network",
    )
    tensor_network: float = constant(
        Prior(0.7, spread=0.3, low=0.1, high=1.3, unit="1"),
        "bandwidth between nodes for the tensor axis, as a share of the curve's",
        "its messages are some 30 MB: 32 MiB reach a quarter of the curve's over 4 nodes (as for"
        " bucket_latency), several at once more",
    )
    data_overlap: float = constant(
        Prior(0.5, spread=0.25, low=0.0, high=1.0, unit="1"),
        "share of the last backward pass that can hide the reduction of gradients",
        "anything from none to all of the backward pass may hide it (DDP, arXiv 2006.15704)",
    )
    bucket_latency: float = constant(
        Prior(0.3e-3, spread=0.15e-3, low=0.0, high=1e-3, unit="s"),
        "latency of reducing one bucket of gradients between nodes, beyond what its bytes take",
        "64 MiB over 4 nodes take 0.8 ms, 0.45 ms longer than their share of 4 GiB (Bekman, Machine"
        " Learning Engineering, chapter on networks, 2026); DDP reduces buckets of 25 MB",
    )
    prefetch_overlap: float = constant(
        Prior(0.9, spread=0.05, low=0.0, high=1.0, unit="1"),
        "share of a micro-batch's compute that can hide the gathers and scatters of sharded"
        " parameters and gradients",
        "layers are gathered one ahead of their use, on a stream of their own (PyTorch FSDP,"
        " arXiv 2304.11277, section 3.3); communication takes some multiprocessors from compute",
    )
    update_passes: float = constant(
        Prior(40.0, spread=12.0, low=20.0, high=120.0, unit="bytes"),
        "traffic per parameter that a rank updates",
        "count: Adam reads 16 and writes 14 bytes; unfused kernels repeat some",
    )
    step_latency: float = constant(
        Prior(0.03, spread=0.015, low=0.0, high=0.2, unit="s"),
        "additional time of a step per doubling of the nodes: many small reductions, and the"
        " slowest rank",
        "assumed: tens of milliseconds for gradient norms, losses and waiting",
    )


@dataclass(frozen=True)
class MemoryConstants:
    """Constants of the memory that the allocator takes from the device."""

    fragmentation: float = constant(
        Prior(1.15, spread=0.15, low=1.0, high=1.7, unit="1"),
        "bytes reserved per byte of activations, because freed blocks do not fit the next requests",
        "1 is none; reserved over allocated memory of long runs is 1.1 to 1.4",
    )
    layer_hidden: float = constant(
        Prior(16.0, spread=0.2, low=10.0, high=24.0, unit="bytes"),
        "activations kept for backward, per token and element of the hidden size in each layer",
        "count: inputs and outputs of both norms, queries, keys, values and the output of"
        " attention, 2 bytes each (Korthikanti and others, arXiv 2205.05198, section 4.1, without"
        " dropout and scores)",
    )
    layer_feed: float = constant(
        Prior(8.0, spread=0.1, low=4.0, high=14.0, unit="bytes"),
        "activations kept for backward, per token and element of the feed-forward size",
        "count: both halves of the gated product, the activated half and the product, 2 bytes each",
    )
    gathered: float = constant(
        Prior(4.0, spread=0.1, low=0.0, high=16.0, unit="bytes"),
        "activations that tensor parallelism does not split, per token and element of the hidden"
        " size in each layer, while the device is behind the processor's launches",
        "count: outputs of attention and feed-forward before they are scattered, 2 bytes each;"
        " memory that another stream reads is reused only after that (PyTorch,"
        " Tensor.record_stream)",
    )
    logit: float = constant(
        Prior(8.0, spread=0.2, low=2.0, high=24.0, unit="bytes"),
        "kept per logit of a micro-batch",
        "count: logits and their softmax in fp32",
    )
    bucket: float = constant(
        Prior(2.0, spread=0.05, low=0.0, high=6.0, unit="bytes"),
        "second copy of gradients in buckets, per parameter",
        "2 for bf16 buckets, 4 for fp32 ones (DDP, arXiv 2006.15704)",
    )
    overhead: float = constant(
        Prior(1.0, spread=0.5, low=0.0, high=4.0, unit="GB"),
        "workspaces that are always allocated",
        "workspaces of matrix products and collectives",
    )
    knee: float = constant(
        Prior(0.8, spread=0.1, low=0.5, high=1.0, unit="1"),
        "share of device memory above which the allocator frees cached blocks",
        "assumed: below the limit of every device",
    )


@dataclass(frozen=True)
class MemoryLimit:
    share: float
    """Share of device memory that half of the runs can use."""
    spread: float
    """Standard deviation of the logarithm of that share."""

    def passed(self, demand: Floats, memory_bytes: float, deviation: Floats) -> Floats:
        """Returns the probability that a demand in bytes is below the limit. `deviation`: standard
        deviation of the log demand."""
        spread = np.hypot(self.spread, deviation)
        result: Floats = ndtr(np.log(self.share * memory_bytes / demand) / spread)
        return result


@dataclass(frozen=True)
class Widening:
    """Increases of half-widths per doubling beyond the measured range."""

    time: float
    memory: float


@dataclass(frozen=True)
class ClusterSpread:
    """Half-widths of log 80% intervals. The fields from `time` to `memory`, and both widenings,
    come from runs left out of a fit (docs/studies/planner_calibration.py)."""

    time: float
    """Half-width for step time on one node."""
    time_per_doubling: float
    memory: float
    room: MemoryLimit
    """Limit beyond which the allocator frees memory in every micro-batch."""
    end: MemoryLimit
    """Limit beyond which a run fails even after freeing everything it can."""
    slow: float
    """Mean log slowdown beyond `room`."""
    slow_spread: float
    nodes: Widening
    """Widening per doubling of nodes, or of a model-parallel axis, beyond those measured."""
    shape: Widening
    """Widening per doubling of parameters beyond the measured models."""

    def upper(self, half_width: Floats, slow: Floats) -> Floats:
        """Returns the half-width above the predicted log step time, at least `half_width`. It is
        the 0.9-quantile of a mixture of full-speed runs and a share `slow` of slow runs (arrays of
        one shape), so that one run in ten lies above it."""
        tenth = np.minimum(slow, 0.0999)
        within = half_width / ndtri(0.9) * ndtri(0.9 / (1 - tenth))
        share = np.clip(0.1 / np.maximum(slow, 0.1), 0.001, 0.999)
        beyond = self.slow + self.slow_spread * ndtri(1 - share)
        moved = np.maximum(half_width, np.minimum(within, self.slow))
        result: Floats = np.where(slow < 0.1, moved, np.maximum(moved, beyond))
        return result


@dataclass(frozen=True)
class CalibratedRange:
    parameters: tuple[float, float]
    nodes: tuple[int, int]
    tensor: int
    pipeline: int

    def model_beyond(self, parameters: float) -> float:
        """Returns doublings of parameters outside the range."""
        low, high = self.parameters
        return float(max(0.0, np.log2(low / parameters), np.log2(parameters / high)))

    def layout_beyond(self, nodes: Ints, tensor: Ints, pipeline: Ints) -> Floats:
        """Returns by how many doublings nodes and axes exceed the measured range, summed; those
        within it count 0."""
        total: Floats = np.zeros(len(nodes))
        most = (self.nodes[1], self.tensor, self.pipeline)
        for value, limit in zip((nodes, tensor, pipeline), most, strict=True):
            total = total + np.maximum(0.0, np.log2(np.maximum(value, 1) / limit))
        return total


@dataclass(frozen=True)
class ClusterCalibration:
    """Everything a prediction needs besides the question."""

    source: str
    time: TimeConstants
    memory: MemoryConstants
    spread: ClusterSpread
    range: CalibratedRange
    links: str
    anchor: Anchor | None = None
    """Correction by the user's own runs. None if there are none."""

    def is_of(self, like: str, links: str) -> bool:
        """Returns whether the calibrated runs were made by a program; without a name, whether they
        were made on these links."""
        return PROGRAMS[like].calibrated if like else links == self.links

    def time_on(self, like: str, links: str, hopper: bool) -> TimeConstants:
        """Returns the step-time constants of a program; `pipeline_stall` is 0 if it did not make
        the calibrated runs."""
        program = PROGRAMS[like]
        factors = {**program.time, **(program.hopper if hopper else {})}
        if not self.is_of(like, links):
            factors["pipeline_stall"] = 0.0
        return replace(
            self.time, **{name: value * getattr(self.time, name) for name, value in factors.items()}
        )

    def memory_on(self, like: str, links: str) -> MemoryConstants:
        """Returns the memory constants. Only nanotron, which made the calibrated runs, keeps a
        second copy of gradients."""
        return self.memory if self.is_of(like, links) else replace(self.memory, bucket=0.0)


def calibration_file(given: str | Path | None) -> Path:
    return DEFAULT if given is None or str(given) == "default" else Path(given)


def load(file: Path = DEFAULT) -> ClusterCalibration:
    """Reads a calibration; raises UsageError if unreadable or out of bounds."""
    try:
        values = parse_yaml(file.read_bytes(), f"calibration {str(file)!r}")
        calibration = TypeAdapter(ClusterCalibration).validate_python(values)
    except OSError as error:
        raise UsageError(f"cannot read calibration {str(file)!r}: {error.strerror}") from None
    except ValidationError as error:
        raise UsageError(f"calibration {str(file)!r}: {first_error(error)}") from None
    for constants in (calibration.time, calibration.memory):
        require_within_bounds(constants, str(file))
    return calibration


def require_within_bounds(constants: TimeConstants | MemoryConstants, where: str) -> None:
    for name, prior in priors_of(type(constants)).items():
        value, slack = getattr(constants, name), 1e-9 * (prior.high - prior.low)
        if not prior.low - slack <= value <= prior.high + slack:
            raise UsageError(
                f"{where}: {name} is {value:g} {prior.unit}, outside its bounds {prior.low:g} to"
                f" {prior.high:g}"
            )
