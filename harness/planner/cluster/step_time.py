"""Time of a step: roofline of a layer, launches, collectives, pipeline, update."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.planner.cluster.axis_links import Links
from harness.planner.cluster.constants import TimeConstants
from harness.planner.cluster.hardware import Cluster
from harness.planner.cluster.layout_memory import owned_parameters, stage_parameters
from harness.planner.cluster.layouts import Floats, Ints, Layouts
from harness.planner.cluster.model_shape import padded_head
from harness.planner.cluster.question import Question
from harness.planner.cluster.stages import Stage, numbered_stages, stages

UNGATED = 0.4
"""Reads and writes of the feed-forward size by an activation alone, as a share of those by a gated
one: 2 of 5 forward (SiLU reads and writes, its product with the other half reads two and writes
one), and as many for each gradient."""
AHEAD_POWER = 2.0
"""Exponent of the share by which the processor is ahead of the device. A device that takes r times
as long for a layer as its launches has done 1 / r of what is launched; where r is below 1 only
single long kernels are waited for. Assumed: r^2 / (1 + r^2), which is a half where both take as
long; between 2 and 4 the errors hardly depend on it."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by layout (shape [layouts]); the parts add up to the whole."""

    compute: Floats
    activation_exchange: Floats
    """Exposed communication of the tensor, context and expert axes."""
    data: Floats
    """Exposed communication of the data axis: gradients and sharded parameters."""
    bubble: Floats
    """Waiting in the pipeline: filling it, draining it, and for its slowest stage."""
    launch: Floats
    """The device waits for its processor to launch work."""
    offload: Floats
    update: Floats
    owned: Floats
    """Parameters that one rank of the largest stage updates."""
    ahead: Floats
    """Share of what the processor has launched that the device has yet to do, 0 to 1; see
    `memory`."""

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
    """Seconds of one micro-batch (shape [layouts])."""

    compute: Floats
    """Of a layer, forward and backward."""
    head: Floats
    communication: Floats
    """Exposed, of a layer."""
    launch: Floats
    """The processor's, of a layer, undisturbed."""
    stalled: Floats
    """The same with the waits that a pipeline between nodes adds."""
    sharpness: float
    """Of the maximum of device and processor."""

    def of_stage(self, stage: Stage, rows: Ints) -> tuple[Floats, Floats]:
        """Seconds that a stage computes, and that it communicates within itself."""
        computed = stage.layers * self.compute[rows] + stage.head * self.head[rows]
        return computed, stage.layers * self.communication[rows]

    def occupied(self, stage: Stage, rows: Ints, device: Floats) -> Floats:
        """Seconds that a stage takes, where its device needs `device`: the processor launches at
        the same time, and the slower of both counts, kernel by kernel: long ones hide the launches
        of those behind them, short ones wait for theirs. The smooth maximum of both is assumed; its
        sharpness is fitted (`launch_sharpness`)."""
        modules = stage.layers + 0.5 * stage.head
        power = self.sharpness
        free = (device**power + (modules * self.launch[rows]) ** power) ** (1 / power)
        stalled = modules * self.stalled[rows]
        # Stalls hold all kernels of a layer up alike: with them the longer one counts.
        return np.maximum(free, stalled)


def product(
    m: Floats | float,
    k: Floats | float,
    n: Floats | float,
    cluster: Cluster,
    c: TimeConstants,
    parts: Floats | float = 1.0,
) -> Floats:
    """Seconds of a product of M x K by K x N on one device, with its rows in so many parts.

    2 M K N operations at the reached rate, times 1 + half size x ridge x (parts/M + 1/K + 1/N):
    with a half size of 1 that is the time to read the operands once (a K x N matrix once for each
    part) and to write the result, (roofline: Williams and others, CACM 2009), and unfilled tiles
    grow alike.
    """
    ridge = cluster.flops_per_second / cluster.memory_bytes_per_second
    small = 1 + c.matmul_half_size * ridge * (parts / m + 1 / k + 1 / n)
    rate = cluster.reached_flops_per_second * c.matmul_efficiency
    return np.asarray(2.0 * m * k * n / rate * small)


def _layer(question: Question, layouts: Layouts, links: Links, c: TimeConstants) -> _Layer:
    """Seconds of a layer for one micro-batch: matrix products and elementwise passes by the
    roofline (Williams and others, CACM 2009), attention by its operations at a share of the peak
    (FlashAttention-2, arXiv 2307.08691), and the processor's launches, whose times are fitted."""
    shape, cluster = question.shape, question.cluster
    peak, memory_rate = cluster.flops_per_second, cluster.memory_bytes_per_second
    h, f, v = float(shape.hidden), float(shape.feed_forward), float(shape.vocabulary)
    tensor = layouts.tensor.astype(float)
    tokens = layouts.micro_batch * float(question.sequence_length) / layouts.context
    queries, keys = shape.attention_width, shape.kv_width
    routed = tokens * shape.experts_per_token
    # Tokens of one expert's product; the products of all experts of a rank together are `routed`.
    per_expert = np.maximum(1.0, routed / shape.experts)
    gate = 2 if shape.gated else 1

    def products(parts: Floats | float) -> Floats:
        """Forward of all products of a layer, with the rows of each in parts."""
        blocks = product(per_expert, h, gate * f / tensor, cluster, c, parts)
        blocks = blocks + product(per_expert, f / tensor, h, cluster, c, parts)
        qkv = product(tokens, h, (queries + 2 * keys) / tensor, cluster, c, parts)
        out = product(tokens, queries / tensor, h, cluster, c, parts)
        return qkv + out + routed / per_expert * blocks

    forward = products(1.0)
    # Asynchronous tensor parallelism multiplies its own rows while the others' are gathered, then
    # those before and after: one of three products of each matrix (forward or backward).
    split = products(np.minimum(tensor, 3.0))
    attention = (
        2.0
        * tokens
        * question.sequence_length
        * shape.heads
        * padded_head(shape.head_size)
        / tensor
    ) / (peak * c.attention_efficiency)
    width = h + (1.0 if shape.gated else UNGATED) * f * shape.experts_per_token
    passes = 2.0 * tokens * width / tensor / memory_rate
    again = np.choose(
        layouts.recompute,
        [0.0 * forward, c.elementwise_passes * passes / 3, forward + attention],
    )
    # Backward multiplies twice as often as forward; attention's backward costs 2.5 forwards
    # (FlashAttention-2, arXiv 2307.08691, section 3).
    compute = 2 * forward + split + 3.5 * attention + c.elementwise_passes * passes + again
    head = 3 * product(tokens, h, v / tensor, cluster, c)
    head = head + c.logit_bytes * tokens * v / tensor / memory_rate
    launch = c.launch_layer + np.where(tensor > 1, c.launch_tensor, 0.0)
    launch = launch * np.where(layouts.recompute == 2, 4 / 3, 1.0)
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


def step_time(question: Question, layouts: Layouts, c: TimeConstants) -> StepTime:
    """The step time of each layout, in seconds.

    Pipelines follow 1F1B with unequal stages: the sum over stages for the first micro-batch, and
    the slowest stage for each further one (PipeDream-2BW, arXiv 2006.09503; interleaved chunks
    divide the fill, Megatron-LM, arXiv 2104.04473, section 2.2).
    """
    shape, cluster = question.shape, question.cluster
    links = Links.of(cluster, layouts, c)
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
    # What the last micro-batch waits for: all stages once, or a share of them when interleaved.
    ends = np.where(layouts.chunks > 1, mean + (fill - mean) / layouts.chunks, fill)
    pipe = ends + (steps - 1) * slowest
    data, offload = links.data_axis(question, layouts, largest, owned, slowest, c)
    updated = np.where(layouts.offload >= 1, 0.0, owned)
    update = updated * c.update_passes / cluster.memory_bytes_per_second
    share = steps / layouts.pipeline
    device = layer.compute + layer.communication
    return StepTime(
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


def stage_seconds(question: Question, layouts: Layouts, c: TimeConstants) -> Floats:
    """Seconds of a micro-batch, forward and backward, in each stage of layouts whose pipelines are
    equally long (shape [layouts, stages]), by the same formulas as `step_time`."""
    links = Links.of(question.cluster, layouts, c)
    layer = _layer(question, layouts, links, c)
    between = links.between_stages(question, layouts)
    length = int(layouts.pipeline[0])
    result = np.zeros((len(layouts), length))
    rows = np.arange(len(layouts))
    for stage, numbers in numbered_stages(question.shape, length):
        computed, sent = layer.of_stage(stage, rows)
        time = layer.occupied(stage, rows, computed + sent + between)
        result[:, numbers] = time[:, None]
    return result
