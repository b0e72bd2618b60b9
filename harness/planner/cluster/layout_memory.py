"""Memory of a rank: model states and activations of the fullest stage, and what the allocator
reserves for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.planner.cluster.calibration import MemoryConstants
from harness.planner.cluster.hardware import Cluster
from harness.planner.cluster.layouts import PlannedLayouts
from harness.planner.cluster.model_shape import LayerStage, ModelShape, stages
from harness.planner.fitting import Bools, Floats, Ints

PARAMETER_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2.0, 2.0, 12.0
"""Of a parameter in mixed-precision training: bf16 parameter and gradient; fp32 copy and two
moments of Adam (ZeRO, arXiv 1910.02054, section 3.1, K = 12)."""
ACCUMULATED_BYTES = 4.0
"""Of a gradient that is accumulated in fp32 instead."""
UNGATED = 0.5
"""Tensors of the feed-forward size that a layer without a gate keeps, as a share of those of a
gated one: what goes into the activation and what comes out, against two more with a gate."""
GIGA = 1e9


@dataclass(frozen=True)
class LayoutMemory:
    """Bytes on the device by layout (shape [layouts]), of the stage that asks for most."""

    states: Floats
    """Parameters, gradients and optimizer state."""
    activations: Floats
    """Kept for the backward pass, of all micro-batches in flight."""
    pending: Floats
    """Of the activations, those that are done with once the device has done what is launched."""
    working: Floats
    """Buckets of gradients, gathered parameters, workspaces."""
    demand: Floats
    """What the allocator would reserve on a device without limit."""
    reserved: Floats
    """What it reserves on this device: it frees what it holds in reserve as the limit nears."""

    @property
    def allocated(self) -> Floats:
        return self.states + self.activations + self.working


def model_states(
    parameters: Floats | float,
    data: Floats | float,
    zero: int,
    gradient_bytes: float = GRADIENT_BYTES,
) -> Floats | float:
    """Bytes of parameters, gradients and optimizer state on one of `data` ranks under ZeRO's stage
    0 to 3 (ZeRO, arXiv 1910.02054, section 5, table 1)."""
    return parameters * (
        PARAMETER_BYTES / (data if zero >= 3 else 1)
        + gradient_bytes / (data if zero >= 2 else 1)
        + OPTIMIZER_BYTES / (data if zero >= 1 else 1)
    )


def stage_parameters(shape: ModelShape, layouts: PlannedLayouts, stage: LayerStage) -> Floats:
    """Parameters on one rank of a stage before ZeRO shards them (shape [layouts]): the tensor axis
    splits them evenly (Megatron-LM, arXiv 1909.08053, section 3)."""
    return _parameters(shape, stage, layouts.expert) / layouts.tensor


def owned_parameters(shape: ModelShape, layouts: PlannedLayouts, stage: LayerStage) -> Floats:
    """Parameters that one rank of a stage updates (shape [layouts]).

    From ZeRO's stage 1 on the data axis shares them (ZeRO, arXiv 1910.02054, section 5.1). Experts
    are shared by the ranks that hold the same ones, which is the same as all experts over the whole
    axis.
    """
    ranks = layouts.data * layouts.context
    whole = _parameters(shape, stage, np.ones_like(ranks)) / layouts.tensor
    return np.where(layouts.zero >= 1, whole / ranks, stage_parameters(shape, layouts, stage))


def _parameters(shape: ModelShape, stage: LayerStage, expert_ranks: Ints) -> Floats:
    """Parameters of a stage with the experts of one of so many ranks."""
    experts = shape.experts * shape.expert_parameters
    layer = shape.layer_parameters - experts + experts / expert_ranks
    ends = float(stage.embedding) + float(stage.head and not (shape.tied and stage.embedding))
    return np.asarray(stage.layers * layer + ends * shape.embedding_parameters)


def _states(held: Floats, owned: Floats, layouts: PlannedLayouts) -> Floats:
    """Model states on the device, gradients accumulated in fp32, less what is offloaded (as
    `model_states`; with offloaded parameters their gradients leave, layer by layer: ZeRO-Infinity,
    arXiv 2104.07857)."""
    parameters = PARAMETER_BYTES * np.where(layouts.zero >= 3, owned, held)
    gradients = ACCUMULATED_BYTES * np.where(layouts.zero >= 2, owned, held)
    on_device = np.where(layouts.offload >= 2, 0.0, parameters + gradients)
    result: Floats = on_device + np.where(layouts.offload >= 1, 0.0, OPTIMIZER_BYTES * owned)
    return result


def offload_fits(cluster: Cluster, layouts: PlannedLayouts, owned: Floats) -> Bools:
    """Whether a node's memory, or its disks, hold what its devices offload (`owned`: parameters
    that a rank of the largest stage updates, shape [layouts])."""
    each = owned * np.where(
        layouts.offload >= 2, OPTIMIZER_BYTES + PARAMETER_BYTES + ACCUMULATED_BYTES, OPTIMIZER_BYTES
    )
    node = each * np.minimum(layouts.devices, cluster.per_node)
    room = np.where(layouts.offload == 3, cluster.disk_bytes, cluster.host_memory_bytes)
    result: Bools = (layouts.offload == 0) | (node <= room)
    return result


def in_flight(layouts: PlannedLayouts, stage: LayerStage) -> Floats:
    """Micro-batches whose activations a stage holds at once under 1F1B: as many as stages follow,
    itself included (PipeDream-2BW, arXiv 2006.09503); interleaved chunks add to them (Megatron-LM,
    arXiv 2104.04473, section 2.2)."""
    plain = np.minimum(layouts.pipeline - stage.first, layouts.accumulation).astype(float)
    more = (layouts.pipeline - 1) / (layouts.pipeline * layouts.chunks)
    result: Floats = np.where(layouts.chunks > 1, plain * (1 + more), plain)
    return result


def _layer_activations(
    shape: ModelShape, sequence: int, layouts: PlannedLayouts, c: MemoryConstants, ahead: Floats
) -> tuple[Floats, Floats, Floats]:
    """Bytes that a layer keeps per micro-batch, that it needs while it is computed again, and,
    among the first, those that are only pending (shape [layouts]).

    Counted tensor by tensor, as the constants say (Korthikanti and others, arXiv 2205.05198,
    section 4); full recomputation keeps the inputs of a layer alone (section 5).
    """
    tokens = layouts.micro_batch * float(sequence) / layouts.context
    tensor = layouts.tensor.astype(float)
    pending = tokens * shape.hidden * np.where(tensor > 1, c.gathered * ahead, 0.0)
    feed = shape.feed_forward * shape.experts_per_token * (1.0 if shape.gated else UNGATED)
    # Half of the tensors are as wide as the hidden size, a quarter each as all heads and as those
    # of keys and values.
    width = (2 * shape.hidden + shape.attention_width + shape.kv_width) / 4
    hidden = width * c.layer_hidden
    whole = tokens * (hidden + feed * c.layer_feed) / tensor + pending
    kept = tokens * (0.6 * hidden + 0.75 * feed * c.layer_feed) / tensor + pending
    inputs = tokens * 2.0 * shape.hidden / tensor
    layer = np.where(layouts.recompute == 2, inputs, np.where(layouts.recompute == 1, kept, whole))
    again = np.where(layouts.recompute > 0, whole - layer, 0.0)
    return layer, again, np.where(layouts.recompute == 2, 0.0, pending)


def memory(
    shape: ModelShape,
    sequence: int,
    cluster: Cluster,
    layouts: PlannedLayouts,
    c: MemoryConstants,
    ahead: Floats,
    first_stage_only: bool = False,
) -> LayoutMemory:
    """The memory of each layout, in bytes.

    The stage that asks for most counts. Its states follow ZeRO (arXiv 1910.02054), its activations
    1F1B (arXiv 2006.09503); what the allocator adds is fitted (`MemoryConstants`).

    `ahead` (shape [layouts], 0 to 1) says how far the processor launches work before the device
    needs it: buffers of tensor parallelism are only used again once the device is done with them,
    so a device that waits for its processor needs fewer. `first_stage_only` is for comparisons with
    measurements of rank 0.
    """
    layer, again, pending = _layer_activations(shape, sequence, layouts, c, ahead)
    tokens = layouts.micro_batch * float(sequence) / layouts.context
    tensor = layouts.tensor.astype(float)
    ranks = layouts.data * layouts.context
    columns = {name: np.zeros(len(layouts)) for name in ("states", "act", "late", "work", "demand")}
    for pipeline in np.unique(layouts.pipeline):
        rows = np.flatnonzero(layouts.pipeline == pipeline)
        part = layouts.take(rows)
        for stage in stages(shape, int(pipeline)):
            if first_stage_only and stage.first:
                continue
            parameters = stage_parameters(shape, part, stage)
            states = _states(parameters, owned_parameters(shape, part, stage), part)
            ends = stage.head * tokens[rows] * shape.vocabulary * c.logit / tensor[rows]
            inputs = stage.embedding * tokens[rows] * 2.0 * shape.hidden / tensor[rows]
            flight = in_flight(part, stage)
            # One layer is computed again at a time, where the stage has any, and the first of them
            # once the backward pass has freed the logits.
            redone = again[rows] * min(stage.layers, 1)
            kept = flight * (stage.layers * layer[rows] + inputs) + np.maximum(ends, redone)
            bucket = np.where(ranks[rows] > 1, c.bucket * parameters, 0.0)
            # Two layers' parameters are gathered at once: the one in use and the next.
            largest = max(shape.layer_parameters, stage.head * shape.embedding_parameters)
            gathered = 2 * PARAMETER_BYTES * largest / tensor[rows] / part.expert
            unsharded = (part.zero >= 3) & (ranks[rows] > 1) | (part.offload >= 2)
            sharded = part.zero >= 2
            bucket = np.where(sharded, np.minimum(bucket, gathered), bucket)
            work = np.where(unsharded, gathered, 0.0) + bucket + c.overhead * GIGA
            demand = states + kept * c.fragmentation + work
            most = demand > columns["demand"][rows]
            for name, value in (
                ("states", states),
                ("act", kept),
                ("late", flight * stage.layers * pending[rows]),
                ("work", work),
                ("demand", demand),
            ):
                columns[name][rows] = np.where(most, value, columns[name][rows])
    demand = columns["demand"]
    return LayoutMemory(
        columns["states"],
        columns["act"],
        columns["late"],
        columns["work"],
        demand,
        capped(demand, cluster.memory_bytes, c.knee),
    )


def capped(demand: Floats, limit: float, knee: float) -> Floats:
    """Bytes reserved under a limit: as demanded up to a knee, then ever more of it is freed.

    The curve is smooth and never passes the limit: a model of PyTorch's caching allocator, which
    frees its cached blocks when the device has no more (its notes on CUDA semantics). That it is an
    exponential is assumed. What is demanded is not cut: `Memory.demand` decides what fits.
    """
    start = knee * limit
    room = max(limit - start, 1e-6 * limit)
    over = np.maximum(demand - start, 0.0)
    result: Floats = np.where(demand <= start, demand, start + room * (1 - np.exp(-over / room)))
    return result
