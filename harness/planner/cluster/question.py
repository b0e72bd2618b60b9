from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.cell.errors import UsageError
from harness.planner.cluster.calibration import Bools, Floats, Ints
from harness.planner.cluster.hardware import Cluster
from harness.planner.cluster.model_shape import ModelShape, empty_stages
from harness.planner.cluster.recipe import PROGRAMS, RECOMPUTE, Loss, Precision, Program

MOST = {"sequence_length": 10**9, "global_batch": 10**9, "devices": 2**20}
"""Maximum values, to catch mistakes and 64-bit overflow."""
MOST_TENSOR_NODES = 4
LEAST_TOKENS = 1024
"""Minimum number of tokens of a sequence per context device."""
MOST_MICRO_BATCH = 128
"""Maximum number of sequences of a micro-batch."""


@dataclass(frozen=True)
class PlannedLayout:
    """A layout; pipeline is the outermost axis, tensor the innermost."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    """Devices that share each sequence's tokens."""
    expert: int = 1
    """Data-axis devices that share a mixture's experts."""
    zero: int = 0
    """ZeRO stage; 3 also means fully sharded FSDP."""
    micro_batch: int = 1
    """Number of sequences per forward pass."""
    accumulation: int = 1
    """Number of micro-batches per step: gradient accumulation."""
    recompute: int = 0
    """Index into RECOMPUTE."""
    offload: int = 0
    """What is offloaded. 0 means nothing, 1 optimizer state to host memory, 2 also parameters to
    host memory, 3 both to disk."""
    chunks: int = 1
    """Model chunks per pipeline rank; above 1, the schedule is interleaved."""
    whole_gradients: int = 0
    """1 if ranks with ZeRO 2 or 3 hold whole gradients until the last micro-batch (FSDP2 without
    synchronisation)."""

    @property
    def devices(self) -> int:
        return self.data * self.pipeline * self.tensor * self.context

    @property
    def text(self) -> str:
        """Readable form, such as `data 8 x tensor 2, ZeRO-1, micro-batch 4 x 2`."""
        axes = [f"{name} {value}" for name in AXES if (value := getattr(self, name)) > 1]
        parts = [" x ".join(axes) or "one device"]
        if self.zero:
            parts.append(f"ZeRO-{self.zero}")
        if self.zero >= 2 and self.accumulation > 1:
            parts.append(f"{'whole' if self.whole_gradients else 'sharded'} gradients")
        parts.append(f"micro-batch {self.micro_batch} x {self.accumulation}")
        if self.recompute:
            parts.append(f"{RECOMPUTE[self.recompute]} recomputation")
        if self.offload:
            parts.append(
                f"offload of {('', 'optimizer', 'parameters', 'all to disk')[self.offload]}"
            )
        if self.chunks > 1:
            parts.append(f"{self.chunks} chunks a stage")
        return ", ".join(parts)


AXES = tuple(field.name for field in dataclasses.fields(PlannedLayout)[:5])


@dataclass(frozen=True)
class PlannedLayouts:
    """Many layouts (each field of shape [layouts])."""

    data: Ints
    pipeline: Ints
    tensor: Ints
    context: Ints
    expert: Ints
    zero: Ints
    micro_batch: Ints
    accumulation: Ints
    recompute: Ints
    offload: Ints
    chunks: Ints
    whole_gradients: Ints

    @classmethod
    def of(cls, layouts: Sequence[PlannedLayout]) -> PlannedLayouts:
        return cls(
            **{
                field.name: np.array([getattr(layout, field.name) for layout in layouts], np.int64)
                for field in dataclasses.fields(cls)
            }
        )

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> PlannedLayout:
        return PlannedLayout(
            **{f.name: int(getattr(self, f.name)[index]) for f in dataclasses.fields(self)}
        )

    def take(self, rows: Ints | Bools) -> PlannedLayouts:
        return PlannedLayouts(
            **{f.name: getattr(self, f.name)[rows] for f in dataclasses.fields(self)}
        )

    @property
    def devices(self) -> Ints:
        return self.data * self.pipeline * self.tensor * self.context

    @property
    def recomputed_layers(self) -> Floats:
        """Share of layers that backward recomputes as a whole."""
        shares = np.array([{"full": 1.0, "half": 0.5}.get(name, 0.0) for name in RECOMPUTE])
        result: Floats = shares[self.recompute]
        return result

    @property
    def native(self) -> Bools:
        """Whether torch's own FSDP2, or a single device, trains each layout."""
        result: Bools = (self.zero >= 2) | (self.devices == 1)
        result &= (self.offload == 0) & (self.pipeline == 1)
        return result


@dataclass(frozen=True)
class ClusterQuestion:
    shape: ModelShape
    cluster: Cluster
    sequence_length: int
    global_batch: int
    """Sequences per step."""
    devices: int
    precision: Precision = "bf16"
    like: str = ""
    """Name of the program in PROGRAMS that trains; empty for torch's own code."""
    loss: Loss | None = None
    """Loss of FSDP2's layouts; None for the program's."""

    @property
    def program(self) -> Program:
        return PROGRAMS[self.like]

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value, label = getattr(self, name), name.replace("_", " ")
            if value < 1:
                raise UsageError(f"{label} is {value}; give at least 1")
            if value > most:
                raise UsageError(f"{label} is {value}; give at most {most}")
        per_node = self.cluster.per_node
        if self.devices > per_node and self.devices % per_node:
            lower = self.devices // per_node * per_node
            raise UsageError(
                f"{self.devices} devices do not fill nodes of {per_node}; the nearest numbers that"
                f" do are {lower} and {lower + per_node}"
            )
        if self.nodes > 1 and self.cluster.is_one_node:
            raise UsageError(
                f"{self.devices} devices need {self.nodes} nodes of {per_node}, but link"
                f" {self.cluster.links!r} has no rate between nodes; add one, such as"
                " nvlink,400gbit"
            )

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.cluster.per_node)

    @property
    def tokens(self) -> int:
        return self.global_batch * self.sequence_length


def divisors(number: int) -> list[int]:
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def _axes(question: ClusterQuestion) -> list[tuple[int, int, int, int]]:
    shape, devices = question.shape, question.devices
    offered = {"data", *question.program.offers}
    most = question.cluster.per_node * MOST_TENSOR_NODES
    result = []
    for tensor in divisors(devices):
        split = (shape.heads, shape.feed_forward, shape.shared_feed_forward)
        if tensor > most or any(size % tensor for size in split):
            continue
        if shape.kv_heads % tensor and tensor % shape.kv_heads:
            continue
        for pipeline in divisors(devices // tensor):
            if pipeline > shape.layers + 1 or empty_stages(shape, pipeline):
                continue
            for context in divisors(devices // tensor // pipeline):
                if question.sequence_length % context:
                    continue
                if context > 1 and question.sequence_length // context < LEAST_TOKENS:
                    continue
                data = devices // tensor // pipeline // context
                sizes = data, pipeline, tensor, context
                if {axis for axis, size in zip(AXES, sizes, strict=False) if size > 1} <= offered:
                    result.append(sizes)
    return result


def _sharding(program: Program, data: int, pipeline: int, context: int) -> list[tuple[int, int]]:
    """Returns pairs of ZeRO stage and offload that a program offers.

    Stages 2 and 3 shard gradients in every micro-batch; DeepSpeed refuses them in pipelines.
    Parameters are offloaded only with stage 3 or on one device.
    """
    shards = data * context
    stages = [0] if shards == 1 else [0, 1] if pipeline > 1 else [0, 1, 2, 3]
    stages = [zero for zero in stages if shards == 1 or zero in program.zero]
    pairs = [(zero, 0) for zero in stages]
    if pipeline == 1 and "offload" in program.offers:
        pairs += [(zero, 1) for zero in stages if zero or shards == 1]
        pairs += [(zero, level) for zero in stages for level in (2, 3) if zero == 3 or shards == 1]
    return pairs


def enumerate_layouts(question: ClusterQuestion) -> PlannedLayouts:
    """Returns every evenly divided layout. If there is none, raises UsageError with the nearest
    divisible batch."""
    shape, program = question.shape, question.program
    columns: list[tuple[int, ...]] = []
    axes = _axes(question)
    for data, pipeline, tensor, context in axes:
        if question.global_batch % data:
            continue
        per_rank = question.global_batch // data
        sizes = [size for size in divisors(per_rank) if size <= MOST_MICRO_BATCH]
        experts = [
            expert
            for expert in divisors(data)
            if shape.experts % expert == 0 and (expert == 1 or "expert" in program.offers)
        ] or [1]
        chunks = [1]
        if pipeline > 1 and "chunks" in program.offers:
            chunks += [c for c in (2, 4) if shape.layers % (pipeline * c) == 0]
        for expert, (zero, off), size, again, chunk, whole in itertools.product(
            experts,
            _sharding(program, data, pipeline, context),
            sizes,
            range(len(RECOMPUTE)),
            chunks,
            (0, 1),
        ):
            steps = per_rank // size
            native = (zero >= 2 or data * pipeline * tensor * context == 1) and not off
            if (RECOMPUTE[again] == "selective-op" or whole) and not native:
                continue
            if whole and (zero < 2 or steps == 1 or program.synchronised):
                continue
            if question.precision == "pure-bf16-fused" and steps > 1:
                continue
            # Sequences are split only if a micro-batch of one sequence is too large.
            if (chunk > 1 and steps % pipeline) or (context > 1 and size > 1):
                continue
            numbers = (data, pipeline, tensor, context, expert, zero, size, steps)
            columns.append((*numbers, again, off, chunk, whole))
    if not columns:
        raise UsageError(_nothing(question, axes))
    return PlannedLayouts(*np.array(columns, np.int64).T)


def _nothing(question: ClusterQuestion, axes: Sequence[tuple[int, int, int, int]]) -> str:
    batch = question.global_batch
    if question.precision == "pure-bf16-fused":
        at_once = {
            data * size
            for data, _, _, context in axes
            for size in (range(1, MOST_MICRO_BATCH + 1) if context == 1 else (1,))
        }
        nearest = min(sorted(at_once), key=lambda size: abs(size - batch))
        return (
            f"a batch of {batch} sequences on {question.devices} devices needs gradient"
            f" accumulation, which {question.precision} excludes; use a batch of {nearest}"
        )
    least = min(data for data, *_ in axes)
    nearest = max(least, round(batch / least) * least)
    return (
        f"a batch of {batch} sequences cannot be divided over {question.devices} devices in any"
        f" layout of {question.shape.name}; the nearest that can is {nearest}"
    )
