from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from harness.planner.cluster.calibration import Floats, Ints, TimeConstants
from harness.planner.cluster.hardware import Cluster
from harness.planner.cluster.layout_memory import owned_parameters, stage_parameters
from harness.planner.cluster.model_shape import LayerStage, padded_head, stages
from harness.planner.cluster.question import ClusterQuestion, PlannedLayouts
from harness.planner.cluster.recipe import STATES

BUCKET_BYTES = 25e6
"""Bytes of bf16 gradients that DDP reduces at once (`bucket_cap_mb`)."""
TENSOR_COLLECTIVES = 10.0
"""Collectives per layer with sequence parallelism: four each in forward and backward (arXiv
2205.05198, section 4.2.2), and two gathers for weight gradients."""
NATIVE_COLLECTIVES = 8.0
"""Collectives per layer in torch's own tensor parallelism, which keeps gathered inputs."""
CONTENTION = 0.189
"""Mean slowdown of compute while communication runs, on 4 A100 and H100 (Lee and others, arXiv
2507.03114). Applies to ZeRO 2 and 3; for ZeRO 0 and 1 it is part of the fitted constants."""

UNGATED = 0.4
"""Memory passes of an ungated activation relative to a gated activation. SiLU takes two passes, and
its product with the gate three more."""
AHEAD_POWER = 2.0
"""Exponent p in the processor's lead r^p / (1 + r^p), if a layer takes the device r times as long
as its launches. Assumed."""


@dataclass(frozen=True)
class AxisBandwidths:
    """Bytes per second on each axis of a layout (shape [layouts])."""

    nodes: Ints
    tensor_nodes: Ints
    """Nodes spanned by a tensor group."""
    data_nodes: Ints
    """Nodes spanned by a group of the data and context axes."""
    tensor: Floats
    reduce: Floats
    """All-reduce bandwidth on the data axis."""
    gather: Floats
    """Bandwidth of all-gather and reduce-scatter on the data axis."""
    stage: Floats
    exchange: Floats
    """Bandwidth of all-to-alls among the ranks that share experts."""

    @classmethod
    def of(cls, cluster: Cluster, layouts: PlannedLayouts, c: TimeConstants) -> AxisBandwidths:
        """Returns bandwidths; tensor is innermost, then context and data, pipeline outermost."""
        per_node = cluster.per_node
        ones = np.ones_like(layouts.devices)
        nodes = np.maximum(ones, -(-layouts.devices // per_node))
        tensor_nodes = np.maximum(ones, -(-layouts.tensor // per_node))
        inside = cluster.gather_bytes_per_second
        tensor_ranks = np.minimum(layouts.tensor, per_node)
        tensor = cluster.bandwidth(inside, tensor_nodes, tensor_ranks, c.tensor_network)
        ranks = layouts.data * layouts.context
        data_nodes = np.minimum(nodes, -(-(ranks * layouts.tensor) // per_node))
        on_node = np.minimum(ranks, np.maximum(1, per_node // np.minimum(layouts.tensor, per_node)))
        reduce, gather = (
            cluster.bandwidth(rate, data_nodes, on_node, c.network_bandwidth)
            for rate in (cluster.reduce_bytes_per_second, inside)
        )
        pair = cluster.bandwidth(inside, ones, 2 * ones)
        wire = cluster.wire_bytes_per_second or inside
        stage = np.where(nodes > 1, np.minimum(pair, wire), pair)
        # Each rank sends to every other one, so nodes cannot gather first.
        expert_nodes = -(-(layouts.expert * layouts.context * layouts.tensor) // per_node)
        crossing = np.maximum(ones, expert_nodes - 1)
        exchange = np.where(
            expert_nodes > 1,
            np.minimum(pair, wire * expert_nodes / crossing),
            cluster.bandwidth(inside, ones, np.minimum(layouts.expert, per_node)),
        )
        return cls(nodes, tensor_nodes, data_nodes, tensor, reduce, gather, stage, exchange)

    def between_stages(self, question: ClusterQuestion, layouts: PlannedLayouts) -> Floats:
        """Returns seconds to send a micro-batch's activations forward and gradients back.

        Hidden states travel once each way per interleaved chunk (Megatron-LM, arXiv 2104.04473,
        section 2.2), split over the tensor axis (section 4.1).
        """
        tokens = layouts.micro_batch * float(question.sequence_length) / layouts.context
        size = tokens * question.shape.hidden / layouts.tensor
        size = size * STATES[question.precision].element
        result: Floats = 2.0 * layouts.chunks * size / self.stage
        return result

    def layer_communication(
        self,
        question: ClusterQuestion,
        layouts: PlannedLayouts,
        tokens: Floats,
        attention: Floats,
        c: TimeConstants,
    ) -> Floats:
        """Returns exposed seconds of a layer's collectives, forward and backward.

        Tensor axis: arXiv 2205.05198 (see TENSOR_COLLECTIVES), with a fitted exposed share. Context
        axis: ring attention, arXiv 2310.01889. Expert axis: GShard, arXiv 2006.16668.
        """
        shape = question.shape
        tensor, context = layouts.tensor.astype(float), layouts.context.astype(float)
        element = STATES[question.precision].element
        hidden = tokens * shape.hidden * element
        collectives = TENSOR_COLLECTIVES * (1 + 0.4 * layouts.recomputed_layers)
        collectives = collectives * c.tensor_exposed
        # DTensor waits for each gather and scatter (PyTorch, parallelize_module without
        # asynchronous tensor parallelism).
        native = NATIVE_COLLECTIVES * (1 + 0.5 * layouts.recomputed_layers)
        collectives = np.where(layouts.native, native, collectives)
        # Counts the whole tensor, not (n - 1) / n: behind one switch, 2 to 8 ranks take about as
        # long.
        seconds = collectives * hidden * (tensor > 1) / self.tensor
        # Keys and values go around the ring once in forward and, with their gradients, twice in
        # backward, hidden behind attention to the previous part.
        passed = 6.0 * (context - 1) * tokens * shape.kv_width * element / tensor
        seconds = seconds + np.maximum(0.0, passed / self.gather - 3.5 * attention)
        # Two all-to-alls in forward and two in backward.
        expert = layouts.expert.astype(float)
        moved = 4.0 * shape.experts_per_token * hidden / tensor * (expert - 1) / expert
        result: Floats = seconds + moved / self.exchange
        return result

    def data_axis(
        self,
        question: ClusterQuestion,
        layouts: PlannedLayouts,
        parameters: Floats,
        owned: Floats,
        micro_batch_seconds: Floats,
        c: TimeConstants,
    ) -> tuple[Floats, Floats]:
        """Returns exposed seconds of gradients and sharded parameters, and those of offload.

        Rings of n ranks send (n - 1) / n of the bytes for a gather or reduce-scatter, twice that
        for an all-reduce (Patarasuk and Yuan, 2009). ZeRO stages 0 and 1 reduce gradients once per
        step, stages 2 and 3 in every micro-batch unless ranks hold gradients whole. Stage 3 also
        gathers parameters in every forward and backward, torch's stage 2 (FSDP2 without resharding)
        in every forward.
        """
        cluster = question.cluster
        of = STATES[question.precision]
        ranks = (layouts.data * layouts.context).astype(float)
        part = (ranks - 1) / ranks
        zero, steps = layouts.zero, layouts.accumulation
        reduce = 2 * part * of.reduced * parameters / self.reduce
        buckets = parameters * of.element / BUCKET_BYTES
        between = (self.data_nodes > 1) & (ranks > 1)
        reduce = reduce + np.where(between, buckets * c.bucket_latency, 0.0)
        scatter = part * of.reduced * parameters / self.gather
        gather = part * of.element * parameters / self.gather
        backward = 2 / 3 * micro_batch_seconds
        once = np.maximum(0.0, np.where(zero <= 1, reduce, 0.0) - c.data_overlap * backward)
        regathers = layouts.native & (zero == 2)
        once = once + np.where((zero == 1) | ((zero == 2) & ~layouts.native), gather, 0.0)
        once = once + np.where(ranks > 1, c.step_latency * np.log2(self.nodes), 0.0)
        slowed = np.where(zero >= 2, CONTENTION, 0.0)

        def exposed(seconds: Floats, computed: Floats) -> Floats:
            # Neighbouring layers hide all but the first gather and the last scatter.
            ends = seconds / question.shape.layers
            hidden = np.minimum(seconds - ends, c.prefetch_overlap * computed)
            result: Floats = seconds - hidden + slowed * hidden
            return result

        scattered = np.where(zero >= 2, scatter, 0.0)
        gathered = np.where(zero >= 3, 2 * gather, 0.0)
        computed = np.where(zero >= 3, micro_batch_seconds, backward)
        last = exposed(scattered + gathered, computed)
        others = np.where(layouts.whole_gradients == 1, exposed(gathered, computed), last)
        ring_seconds = last + (steps - 1) * others
        regathered = exposed(np.where(regathers, gather, 0.0), micro_batch_seconds - backward)
        ring_seconds = ring_seconds + steps * regathered
        host, disk = cluster.host_bytes_per_second, cluster.disk_bytes_per_second
        # Gradients go out and parameters come back. Host memory is assumed to be as fast as its
        # bus.
        moved = owned * (of.reduced + of.element + 2 * of.updated) / host
        offload = np.where(layouts.offload >= 1, moved, 0.0)
        fetched = 2 * steps * of.element * np.where(zero >= 3, owned, parameters) / host
        offload = offload + np.where(layouts.offload >= 2, fetched, 0.0)
        on_node = np.minimum(layouts.devices, cluster.per_node)
        swapped = owned * 2 * of.updated * on_node / disk
        return once + ring_seconds, offload + np.where(layouts.offload >= 3, swapped, 0.0)


@dataclass(frozen=True)
class LayoutStepTime:
    """Seconds of a step (shape [layouts]); the parts add up to `total`."""

    compute: Floats
    activation_exchange: Floats
    data: Floats
    bubble: Floats
    """Time to fill and drain the pipeline, and to wait for the slowest stage."""
    launch: Floats
    """Time the device waits for launches."""
    offload: Floats
    update: Floats
    owned: Floats
    """Parameters that one rank of the largest stage updates."""
    ahead: Floats
    """How far launches run ahead of the device, from 0 to 1."""

    def scaled(self, factor: float) -> LayoutStepTime:
        """Returns these times multiplied by a factor."""
        fields = dataclasses.fields(self)[:-2]
        return dataclasses.replace(
            self, **{field.name: factor * getattr(self, field.name) for field in fields}
        )

    @property
    def total(self) -> Floats:
        return (
            self.compute
            + self.activation_exchange
            + self.data
            + self.bubble
            + self.launch
            + self.offload
            + self.update
        )


@dataclass(frozen=True)
class _Layer:
    """Seconds of one layer for one micro-batch (shape [layouts])."""

    compute: Floats
    head: Floats
    communication: Floats
    launch: Floats
    """Processor time for launches without stalls."""
    stalled: Floats
    """Processor time for launches with the stalls of a pipeline between nodes."""
    sharpness: float

    def of_stage(self, stage: LayerStage, rows: Ints) -> tuple[Floats, Floats]:
        """Returns a stage's seconds of compute and of communication."""
        computed = stage.layers * self.compute[rows] + stage.head * self.head[rows]
        return computed, stage.layers * self.communication[rows]

    def occupied(self, stage: LayerStage, rows: Ints, device: Floats) -> Floats:
        """Returns seconds of a stage whose device needs `device` seconds.

        Long kernels hide later launches. A smooth maximum is assumed, with fitted
        `launch_sharpness`.
        """
        modules = stage.layers + 0.5 * stage.head
        power = self.sharpness
        free = (device**power + (modules * self.launch[rows]) ** power) ** (1 / power)
        stalled = modules * self.stalled[rows]
        # Stalls delay all kernels of a layer equally, so the longer time counts.
        return np.maximum(free, stalled)


def product(
    m: Floats | float,
    k: Floats | float,
    n: Floats | float,
    cluster: Cluster,
    c: TimeConstants,
    parts: Floats | float = 1.0,
) -> Floats:
    """Returns seconds of an M x K by K x N product on one device, its rows cut into `parts`.

    Follows the roofline (Williams and others, CACM 2009). A half size of 1 means reading operands
    once (K x N per part) and writing the result.
    """
    ridge = cluster.flops_per_second / cluster.memory_bytes_per_second
    small = 1 + c.matmul_half_size * ridge * (parts / m + 1 / k + 1 / n)
    rate = cluster.reached_flops_per_second * c.matmul_efficiency
    return np.asarray(2.0 * m * k * n / rate * small)


def _products(
    question: ClusterQuestion,
    layouts: PlannedLayouts,
    c: TimeConstants,
    parts: Floats | float = 1.0,
) -> Floats:
    """Returns seconds of a layer's products in forward, with rows cut into `parts`."""
    shape, cluster = question.shape, question.cluster.computing_in(question.precision)
    h, f = float(shape.hidden), float(shape.feed_forward)
    tensor = layouts.tensor.astype(float)
    tokens = layouts.micro_batch * float(question.sequence_length) / layouts.context
    queries, keys = shape.attention_width, shape.kv_width
    routed = tokens * shape.experts_per_token
    # Tokens in one expert's product; a rank's experts together process `routed`.
    per_expert = np.maximum(1.0, routed * layouts.expert / shape.experts)
    gate = 2 if shape.gated else 1

    def block(rows: Floats, width: float) -> Floats:
        up = product(rows, h, gate * width / tensor, cluster, c, parts)
        return up + product(rows, width / tensor, h, cluster, c, parts)

    blocks = routed / per_expert * block(per_expert, f)
    if shape.shared_feed_forward:
        blocks = blocks + block(tokens, float(shape.shared_feed_forward))
    dense = shape.dense_layers / shape.layers
    blocks = (1 - dense) * blocks
    if shape.dense_feed_forward:
        blocks = blocks + dense * block(tokens, float(shape.dense_feed_forward))
    qkv = product(tokens, h, (queries + 2 * keys) / tensor, cluster, c, parts)
    out = product(tokens, queries / tensor, h, cluster, c, parts)
    return (qkv + out) * shape.attention_parameters / (2 * h * (queries + keys)) + blocks


def _layer(
    question: ClusterQuestion, layouts: PlannedLayouts, links: AxisBandwidths, c: TimeConstants
) -> _Layer:
    """Returns seconds of a layer for one micro-batch.

    Products and elementwise passes follow the roofline (Williams and others, CACM 2009), attention
    a share of the peak (FlashAttention-2, arXiv 2307.08691); launches are fitted.
    """
    shape, cluster = question.shape, question.cluster.computing_in(question.precision)
    element = STATES[question.precision].element
    peak, memory_rate = cluster.flops_per_second, cluster.memory_bytes_per_second
    h, v = float(shape.hidden), float(shape.vocabulary)
    tensor = layouts.tensor.astype(float)
    tokens = layouts.micro_batch * float(question.sequence_length) / layouts.context
    forward = _products(question, layouts, c)
    # Asynchronous tensor parallelism multiplies its own rows while it gathers the others, then
    # those before and after. This affects one of three products per matrix.
    split = _products(question, layouts, c, np.minimum(tensor, 3.0))
    heads_width = shape.heads * padded_head(shape.head_size)
    attention = 2.0 * tokens * question.sequence_length * heads_width / tensor
    attention = attention / (peak * c.attention_efficiency)
    width = h + (1.0 if shape.gated else UNGATED) * shape.active_feed_forward
    passes = element * tokens * width / tensor / memory_rate
    cheap = c.elementwise_passes * passes / 3
    again = layouts.recomputed_layers * (forward + attention)
    again = again + np.where(np.isin(layouts.recompute, (1, 3)), cheap, 0.0)
    # Every second product is recomputed, but not attention.
    again = again + np.where(layouts.recompute == 3, forward / 2, 0.0)
    # Backward has twice the products, and 2.5 times the attention, of forward (FlashAttention-2,
    # arXiv 2307.08691, section 3).
    compute = 2 * forward + split + 3.5 * attention + c.elementwise_passes * passes + again
    head = 3 * product(tokens, h, v / tensor, cluster, c)
    head = head + c.logit_bytes * tokens * v / tensor / memory_rate
    launch = c.launch_layer + np.where(tensor > 1, c.launch_tensor, 0.0)
    launch = launch * (1 + layouts.recomputed_layers / 3)
    span = links.tensor_nodes
    launch = launch + 10 * (span - 1) * c.tensor_latency
    crossing = (layouts.pipeline > 1) & (links.nodes > 1) & (tensor > 1)
    stall = c.pipeline_stall * tensor * (1 + c.stall_growth * np.log2(span))
    return _Layer(
        compute,
        head,
        links.layer_communication(question, layouts, tokens, attention, c),
        launch,
        launch + np.where(crossing, stall, 0.0),
        c.launch_sharpness,
    )


def step_time(
    question: ClusterQuestion, layouts: PlannedLayouts, c: TimeConstants
) -> LayoutStepTime:
    """Returns each layout's step time in seconds.

    Under 1F1B the first micro-batch takes the sum over stages, each further one as long as the
    slowest stage (PipeDream-2BW, arXiv 2006.09503). Interleaved chunks divide the fill
    (Megatron-LM, arXiv 2104.04473, section 2.2).
    """
    shape, cluster = question.shape, question.cluster
    links = AxisBandwidths.of(cluster, layouts, c)
    layer = _layer(question, layouts, links, c)
    count = len(layouts)
    work, wire, waits = np.zeros(count), np.zeros(count), np.zeros(count)
    fill, slowest, largest, owned = np.zeros((4, count))
    between = links.between_stages(question, layouts)
    for pipeline in np.unique(layouts.pipeline):
        rows = np.flatnonzero(layouts.pipeline == pipeline)
        part = layouts.take(rows)
        for stage in stages(shape, int(pipeline)):
            computed, sent = layer.of_stage(stage, rows)
            sent = sent + (between[rows] if pipeline > 1 else 0.0)
            device = computed + sent
            time = layer.occupied(stage, rows, device)
            work[rows] += stage.count * computed
            wire[rows] += stage.count * sent
            waits[rows] += stage.count * np.maximum(0.0, time - device)
            fill[rows] += stage.count * time
            slowest[rows] = np.maximum(slowest[rows], time)
            largest[rows] = np.maximum(largest[rows], stage_parameters(shape, part, stage))
            owned[rows] = np.maximum(owned[rows], owned_parameters(shape, part, stage))
    steps = layouts.accumulation
    mean = fill / layouts.pipeline
    # The last micro-batch waits for all stages once, or for part of them when interleaved.
    ends = np.where(layouts.chunks > 1, mean + (fill - mean) / layouts.chunks, fill)
    pipe = ends + (steps - 1) * slowest
    data, offload = links.data_axis(question, layouts, largest, owned, slowest, c)
    updated = np.where(layouts.offload >= 1, 0.0, owned)
    update = updated * c.update_passes / cluster.memory_bytes_per_second
    share = steps / layouts.pipeline
    device = layer.compute + layer.communication
    return LayoutStepTime(
        compute=share * work,
        activation_exchange=share * wire,
        data=data,
        bubble=(pipe - steps * mean),
        launch=share * waits,
        offload=offload,
        update=update,
        owned=owned,
        ahead=device**AHEAD_POWER / (device**AHEAD_POWER + layer.stalled**AHEAD_POWER),
    )
