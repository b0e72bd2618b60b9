from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from harness.planner.cluster.calibration import Bools, Floats, Ints, MemoryConstants
from harness.planner.cluster.footprint import WORKSPACE_BYTES, footprint, spread
from harness.planner.cluster.hardware import GIGA, Cluster
from harness.planner.cluster.model_shape import LayerStage, ModelShape, stages
from harness.planner.cluster.question import ClusterQuestion, PlannedLayout, PlannedLayouts
from harness.planner.cluster.recipe import (
    RECOMPUTE,
    STATES,
    Library,
    Loss,
    Precision,
    Recipe,
    StateBytes,
)

UNGATED = 0.5
"""Feed-forward tensors of an ungated layer relative to a gated one: two of four."""
CODE_SPREAD = 0.06
"""Standard deviation of log peak memory for unknown layer code; libraries differ by up to 17%."""


@dataclass(frozen=True)
class LayoutMemory:
    """Bytes per device of the fullest stage (shape [layouts])."""

    states: Floats
    activations: Floats
    """Tensors kept for backward by all micro-batches in flight."""
    pending: Floats
    """Activations that are freed only once the device has caught up with its launches."""
    working: Floats
    """Gradient buckets, gathered parameters, workspaces."""
    demand: Floats
    """Bytes the allocator would reserve without a limit."""
    reserved: Floats
    """Bytes that the allocator reserves; less than `demand` near the limit."""

    @property
    def allocated(self) -> Floats:
        return self.states + self.activations + self.working


def model_states(
    held: Floats | float,
    owned: Floats | float,
    zero: Ints | int,
    of: StateBytes,
    whole_gradients: Ints | int = 0,
) -> tuple[Floats, Floats, Floats]:
    """Returns bytes of parameters, gradients and optimizer state on a rank, which holds `held`
    parameters before ZeRO shards them and updates `owned` (arXiv 1910.02054, section 5)."""
    parameters = of.element * np.where(np.asarray(zero) >= 3, owned, held)
    sharded = (np.asarray(zero) >= 2) & (np.asarray(whole_gradients) == 0)
    gradients = of.gradient * np.where(sharded, owned, held)
    optimizer = of.updated * np.where(np.asarray(zero) >= 1, owned, held)
    return parameters, gradients, optimizer


def stage_parameters(shape: ModelShape, layouts: PlannedLayouts, stage: LayerStage) -> Floats:
    """Returns one rank's parameters before ZeRO sharding (shape [layouts]).

    The tensor axis splits them evenly (Megatron-LM, arXiv 1909.08053, section 3).
    """
    return _parameters(shape, stage, layouts.expert) / layouts.tensor


def owned_parameters(shape: ModelShape, layouts: PlannedLayouts, stage: LayerStage) -> Floats:
    """Returns parameters that one rank updates (shape [layouts]).

    From ZeRO stage 1 on, the data axis shares them (arXiv 1910.02054, section 5.1).
    """
    ranks = layouts.data * layouts.context
    whole = _parameters(shape, stage, np.ones_like(ranks)) / layouts.tensor
    return np.where(layouts.zero >= 1, whole / ranks, stage_parameters(shape, layouts, stage))


def _parameters(shape: ModelShape, stage: LayerStage, expert_ranks: Ints) -> Floats:
    experts = shape.routed_parameters
    layer = shape.layer_parameters - experts + experts / expert_ranks
    ends = float(stage.embedding) + float(stage.head and not (shape.tied and stage.embedding))
    return np.asarray(stage.layers * layer + ends * shape.embedding_parameters)


def _states(held: Floats, owned: Floats, layouts: PlannedLayouts, of: StateBytes) -> Floats:
    """Returns the bytes of model states on the device, without offloaded states. Gradients of
    offloaded parameters leave it layer by layer (ZeRO-Infinity, arXiv 2104.07857), unless they stay
    whole until the last micro-batch."""
    parameters, gradients, optimizer = model_states(
        held, owned, layouts.zero, of, layouts.whole_gradients
    )
    unreduced = layouts.whole_gradients * gradients
    on_device = np.where(layouts.offload >= 2, unreduced, parameters + gradients)
    result: Floats = on_device + np.where(layouts.offload >= 1, 0.0, optimizer)
    return result


def offloaded_bytes(
    cluster: Cluster, layouts: PlannedLayouts, owned: Floats, of: StateBytes
) -> Floats:
    """Returns bytes that a node's devices offload (shape [layouts]).

    These are optimizer states and, from level 2 on, parameters and gradients (ZeRO-Infinity, arXiv
    2104.07857). `owned`: parameters that a rank of the largest stage updates.
    """
    states = np.where(layouts.offload >= 2, of.updated + of.element + of.gradient, of.updated)
    per_device = np.where(layouts.offload == 0, 0.0, owned * states)
    result: Floats = per_device * np.minimum(layouts.devices, cluster.per_node)
    return result


def offload_fits(cluster: Cluster, layouts: PlannedLayouts, owned: Floats, of: StateBytes) -> Bools:
    """Returns whether a node can hold what its devices offload (see offloaded_bytes)."""
    node = offloaded_bytes(cluster, layouts, owned, of)
    room = np.where(layouts.offload == 3, cluster.disk_bytes, cluster.host_memory_bytes)
    result: Bools = node <= room
    return result


def in_flight(layouts: PlannedLayouts, stage: LayerStage) -> Floats:
    """Counts micro-batches whose activations a stage holds under 1F1B: one for each stage from this
    one to the last (PipeDream-2BW, arXiv 2006.09503), more with interleaved chunks (Megatron-LM,
    arXiv 2104.04473, section 2.2)."""
    plain = np.minimum(layouts.pipeline - stage.first, layouts.accumulation).astype(float)
    more = (layouts.pipeline - 1) / (layouts.pipeline * layouts.chunks)
    result: Floats = np.where(layouts.chunks > 1, plain * (1 + more), plain)
    return result


def _layer_activations(
    shape: ModelShape,
    sequence: int,
    layouts: PlannedLayouts,
    c: MemoryConstants,
    ahead: Floats,
    element: float,
) -> tuple[Floats, Floats, Floats]:
    """Returns a layer's bytes per micro-batch: kept, recomputed, and pending among the kept.

    Each has shape [layouts]. Tensors are counted as in arXiv 2205.05198, section 4; full
    recomputation keeps only a layer's inputs (section 5).
    """
    tokens = layouts.micro_batch * float(sequence) / layouts.context
    tensor = layouts.tensor.astype(float)
    scale = element / 2
    pending = scale * tokens * shape.hidden * np.where(tensor > 1, c.gathered * ahead, 0.0)
    feed = shape.active_feed_forward * (1.0 if shape.gated else UNGATED)
    # Half of the tensors have the hidden size, a quarter the width of all heads, and a quarter that
    # of keys and values.
    width = (2 * shape.hidden + shape.attention_width + shape.kv_width) / 4
    hidden = width * c.layer_hidden
    whole = scale * tokens * (hidden + feed * c.layer_feed) / tensor + pending
    # Further norms keep their inputs, experts their inputs and outputs.
    further = shape.further_normalised + 2 * shape.routed_width
    whole = whole + element * tokens * further / tensor
    saved = scale * tokens * (0.6 * hidden + 0.75 * feed * c.layer_feed) / tensor + pending
    inputs = tokens * element * shape.hidden / tensor
    share = layouts.recomputed_layers
    layer = np.where(layouts.recompute == 1, saved, share * inputs + (1 - share) * whole)
    again = np.where(share > 0, whole - inputs, whole - layer)
    return layer, again, (1 - share) * pending


def memory(
    shape: ModelShape,
    sequence: int,
    cluster: Cluster,
    layouts: PlannedLayouts,
    c: MemoryConstants,
    ahead: Floats,
    first_stage_only: bool = False,
    precision: Precision = "bf16",
) -> LayoutMemory:
    """Returns bytes of each layout's fullest stage, as in the calibrated runs.

    States follow ZeRO (arXiv 1910.02054) and activations 1F1B (arXiv 2006.09503); the allocator's
    part is fitted. `native_memory` covers torch's own code.

    `ahead` (shape [layouts], 0 to 1) is the launches' lead over the device, during which
    tensor-parallel buffers cannot be reused. `first_stage_only` selects rank 0.
    """
    of = STATES[precision]
    layer, again, pending = _layer_activations(shape, sequence, layouts, c, ahead, of.element)
    tokens = layouts.micro_batch * float(sequence) / layouts.context
    tensor = layouts.tensor.astype(float)
    ranks = layouts.data * layouts.context
    fullest = np.zeros((5, len(layouts)))
    for pipeline in np.unique(layouts.pipeline):
        rows = np.flatnonzero(layouts.pipeline == pipeline)
        part = layouts.take(rows)
        for stage in stages(shape, int(pipeline)):
            if first_stage_only and stage.first:
                continue
            parameters = stage_parameters(shape, part, stage)
            states = _states(parameters, owned_parameters(shape, part, stage), part, of)
            ends = stage.head * tokens[rows] * shape.vocabulary * c.logit / tensor[rows]
            inputs = stage.embedding * tokens[rows] * of.element * shape.hidden / tensor[rows]
            flight = in_flight(part, stage)
            # Layers are recomputed one at a time, after backward has freed the logits.
            redone = again[rows] * min(stage.layers, 1)
            saved = flight * (stage.layers * layer[rows] + inputs) + np.maximum(ends, redone)
            bucket = np.where(ranks[rows] > 1, c.bucket * of.element / 2 * parameters, 0.0)
            # Two layers are gathered at once: the current and the next one.
            largest = max(shape.layer_parameters, stage.head * shape.embedding_parameters)
            gathered = 2 * of.element * largest / tensor[rows] / part.expert
            unsharded = (part.zero >= 3) & (ranks[rows] > 1) | (part.offload >= 2)
            sharded = part.zero >= 2
            bucket = np.where(sharded, np.minimum(bucket, gathered), bucket)
            work = np.where(unsharded, gathered, 0.0) + bucket + c.overhead * GIGA
            demand = states + saved * c.fragmentation + work
            late = flight * stage.layers * pending[rows]
            values = np.array([states, saved, late, work, demand])
            fuller = demand > fullest[-1, rows]
            fullest[:, rows] = np.where(fuller, values, fullest[:, rows])
    states, saved, late, work, demand = fullest
    reserved = capped(demand, cluster.memory_bytes, c.knee)
    return LayoutMemory(states, saved, late, work, demand, reserved)


def recipe_of(
    layout: PlannedLayout,
    sequence: int,
    precision: Precision,
    library: Library = "native",
    loss: Loss | None = None,
) -> Recipe:
    """Returns the recipe of FSDP2, or of one device, for a layout, with `library`'s layers."""
    shards = layout.data * layout.context
    return Recipe(
        precision=precision,
        gpus=shards,
        sharding="none" if shards == 1 else "grad" if layout.zero == 2 else "full",
        recompute=RECOMPUTE[layout.recompute],
        sequence=-(-sequence // layout.context),
        micro_batch=layout.micro_batch,
        accumulation=layout.accumulation,
        synchronised=not layout.whole_gradients,
        tensor=layout.tensor,
        expert=layout.expert,
        library=library,
        loss=loss,
    )


@dataclass(frozen=True)
class NativeMemory:
    """Memory of layouts that torch's own code trains (shape [rows])."""

    rows: Ints
    memory: LayoutMemory
    spread: Floats


def native_memory(question: ClusterQuestion, layouts: PlannedLayouts) -> NativeMemory:
    shape, program = question.shape, question.program
    rows = np.flatnonzero(layouts.native)
    part = layouts.take(rows)
    # Accumulation beyond 2 changes nothing, so fewer recipes need counting.
    part = dataclasses.replace(part, accumulation=np.minimum(part.accumulation, 2))
    first, places = _different_recipes(part)
    figures = []
    for row in first:
        recipe = recipe_of(
            part[int(row)],
            question.sequence_length,
            question.precision,
            program.library,
            question.loss or program.loss,
        )
        found = footprint(shape, recipe)
        deviation = math.hypot(spread(shape, recipe), CODE_SPREAD)
        states = found.resident - WORKSPACE_BYTES + found.gradients
        work = min(WORKSPACE_BYTES + found.gathered, found.peak - states)
        figures.append((states, found.peak - states - work, work, found.demand, deviation))
    totals = np.array(figures, float).reshape(-1, 5)[places].T
    reserved = np.minimum(totals[3], question.cluster.memory_bytes)
    none = np.zeros(len(rows))
    memory = LayoutMemory(totals[0], totals[1], none, totals[2], totals[3], reserved)
    return NativeMemory(rows, memory, totals[4])


def _different_recipes(part: PlannedLayouts) -> tuple[Ints, Ints]:
    """Returns the first layout of each recipe, and each layout's place among them."""
    columns = (
        *(part.data * part.context, part.context, part.tensor, part.expert, part.zero == 2),
        *(part.micro_batch, part.accumulation, part.recompute, part.whole_gradients),
    )
    code = np.zeros(len(part), np.int64)
    for column in columns:
        values, places = np.unique(column, return_inverse=True)
        code = code * len(values) + places
    _, first, places = np.unique(code, return_index=True, return_inverse=True)
    return first, places


def with_native(needed: LayoutMemory, native: NativeMemory) -> LayoutMemory:
    columns = {}
    for field in dataclasses.fields(needed):
        columns[field.name] = getattr(needed, field.name).copy()
        columns[field.name][native.rows] = getattr(native.memory, field.name)
    return LayoutMemory(**columns)


def capped(demand: Floats, limit: float, knee: float) -> Floats:
    """Returns bytes reserved under a limit: the demand up to a knee, then an ever smaller part of
    what exceeds it. PyTorch's allocator frees cached blocks when memory runs out. The exponential
    is assumed."""
    start = knee * limit
    room = max(limit - start, 1e-6 * limit)
    over = np.maximum(demand - start, 0.0)
    result: Floats = np.where(demand <= start, demand, start + room * (1 - np.exp(-over / room)))
    return result
