"""Communication of each axis of a layout over the links of its cluster."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.planner.cluster.constants import TimeConstants
from harness.planner.cluster.hardware import Cluster
from harness.planner.cluster.layout_memory import (
    ACCUMULATED_BYTES,
    OPTIMIZER_BYTES,
    PARAMETER_BYTES,
)
from harness.planner.cluster.layouts import Floats, Ints, Layouts
from harness.planner.cluster.question import Question

ELEMENT_BYTES = 2.0
"""Of an activation in bf16."""
BUCKET_BYTES = 25e6
"""Of the bf16 gradients that DDP reduces at once (its `bucket_cap_mb`)."""
TENSOR_COLLECTIVES = 10.0
"""Of a layer in forward and backward with sequence parallelism: two gathers and two
reduce-scatters each way (Korthikanti and others, arXiv 2205.05198, section 4.2.2), and two gathers
of inputs again for the gradients of weights."""


@dataclass(frozen=True)
class Links:
    """Bandwidths that the axes of each layout see, in bytes per second (shape [layouts])."""

    nodes: Ints
    tensor_nodes: Ints
    """Nodes that a tensor group spans."""
    data_nodes: Ints
    """Nodes that a group of the data and context axes spans."""
    tensor: Floats
    reduce: Floats
    """Of the data axis: all-reduce."""
    gather: Floats
    """Of the data axis: all-gather, reduce-scatter."""
    stage: Floats
    """Of one device to the next stage."""

    @classmethod
    def of(cls, cluster: Cluster, layouts: Layouts, c: TimeConstants) -> Links:
        """What each axis gets: tensor innermost, then context and data, the pipeline outermost.

        A group with g ranks on each node uses g of the node's links, so it gets g / per_node of the
        bandwidth that a collective over all devices has.
        """
        per_node = cluster.per_node
        one = np.ones_like(layouts.devices)
        nodes = np.maximum(one, -(-layouts.devices // per_node))
        tensor_nodes = np.maximum(one, -(-layouts.tensor // per_node))
        inside, outside = cluster.gather.at(one), cluster.gather.at(tensor_nodes)
        tensor = np.where(tensor_nodes > 1, np.minimum(inside, outside * c.tensor_network), inside)
        ranks = layouts.data * layouts.context
        data_nodes = np.minimum(nodes, -(-(ranks * layouts.tensor) // per_node))
        on_node = np.minimum(ranks, np.maximum(1, per_node // np.minimum(layouts.tensor, per_node)))
        share = np.where(data_nodes > 1, on_node / per_node, 1.0)
        # Nothing between nodes is faster than inside of them.
        reduce, gather = (
            share
            * np.where(
                data_nodes > 1,
                np.minimum(curve.at(one), curve.at(data_nodes) * c.network_bandwidth),
                curve.at(one),
            )
            for curve in (cluster.reduce, cluster.gather)
        )
        # With many nodes the bus bandwidth of a node is what its links carry together.
        wire = cluster.reduce.at(np.full_like(nodes, cluster.reduce.nodes[-1])) / per_node
        neighbour = np.where(nodes > 1, np.minimum(inside, wire), inside)
        return cls(nodes, tensor_nodes, data_nodes, tensor, reduce, gather, neighbour)

    def between_stages(self, question: Question, layouts: Layouts) -> Floats:
        """Seconds of a micro-batch's activations to the next stage and their gradients back: as
        many bytes as the hidden states have, once each way and for each interleaved chunk
        (Megatron-LM, arXiv 2104.04473, section 2.2), split over the tensor axis (section 4.1)."""
        tokens = layouts.micro_batch * float(question.sequence_length) / layouts.context
        size = tokens * question.shape.hidden * ELEMENT_BYTES / layouts.tensor
        result: Floats = 2.0 * layouts.chunks * size / self.stage
        return result

    def layer_communication(
        self,
        question: Question,
        layouts: Layouts,
        tokens: Floats,
        attention: Floats,
        c: TimeConstants,
    ) -> Floats:
        """Exposed seconds of a layer's collectives, forward and backward, on the tensor axis
        (arXiv 2205.05198, see TENSOR_COLLECTIVES; their exposed share is fitted), the context axis
        (ring attention, arXiv 2310.01889) and the expert axis (GShard, arXiv 2006.16668)."""
        shape = question.shape
        tensor, context = layouts.tensor.astype(float), layouts.context.astype(float)
        hidden = tokens * shape.hidden * ELEMENT_BYTES
        collectives = TENSOR_COLLECTIVES * np.where(layouts.recompute == 2, 1.4, 1.0)
        # The whole tensor, not (n - 1) / n of it: measured times of 2 to 8 ranks behind one switch
        # are nearly equal.
        seconds = collectives * hidden * (tensor > 1) / self.tensor * c.tensor_exposed
        # Keys and values pass around the ring once forward and, with their gradients, twice back,
        # hidden behind the attention of the part before (ring attention, arXiv 2310.01889).
        passed = 6.0 * (context - 1) * tokens * shape.kv_width * ELEMENT_BYTES / tensor
        seconds = seconds + np.maximum(0.0, passed / self.gather - 3.5 * attention)
        # Two all-to-alls forward and two back (GShard, arXiv 2006.16668).
        expert = layouts.expert.astype(float)
        moved = 4.0 * shape.experts_per_token * hidden / tensor * (expert - 1) / expert
        result: Floats = seconds + moved / self.gather
        return result

    def data_axis(
        self,
        question: Question,
        layouts: Layouts,
        parameters: Floats,
        owned: Floats,
        micro_batch_seconds: Floats,
        c: TimeConstants,
    ) -> tuple[Floats, Floats]:
        """Exposed seconds of gradients and sharded parameters, and of what is offloaded.

        Rings of n ranks send (n - 1) / n of the bytes for a gather or reduce-scatter, twice that
        for an all-reduce (Patarasuk and Yuan, 2009). Stages 0 and 1 of ZeRO reduce fp32 gradients
        once a step, stage 1 then gathers bf16 parameters; stages 2 and 3 scatter gradients with
        every micro-batch; stage 3 gathers parameters in every forward and backward pass.
        """
        cluster = question.cluster
        ranks = (layouts.data * layouts.context).astype(float)
        part = (ranks - 1) / ranks
        zero, steps = layouts.zero, layouts.accumulation
        reduce = 2 * part * ACCUMULATED_BYTES * parameters / self.reduce
        buckets = parameters * PARAMETER_BYTES / BUCKET_BYTES
        between = (self.data_nodes > 1) & (ranks > 1)
        reduce = reduce + np.where(between, buckets * c.bucket_latency, 0.0)
        scatter = part * ACCUMULATED_BYTES * parameters / self.gather
        gather = part * PARAMETER_BYTES * parameters / self.gather
        backward = 2 / 3 * micro_batch_seconds
        once = np.maximum(0.0, np.where(zero <= 1, reduce, 0.0) - c.data_overlap * backward)
        once = once + np.where((zero == 1) | (zero == 2), gather, 0.0)
        once = once + np.where(ranks > 1, c.step_latency * np.log2(self.nodes), 0.0)
        # Sharded layers are gathered, and their gradients scattered, behind the layers beside them;
        # nothing hides the first gather and the last scatter.
        each = np.where(zero >= 2, scatter, 0.0) + np.where(zero >= 3, 2 * gather, 0.0)
        ends = each / question.shape.layers
        hides = c.prefetch_overlap * np.where(zero >= 3, micro_batch_seconds, backward)
        each = ends + np.maximum(0.0, each - ends - hides)
        host, disk = cluster.host_bytes_per_second, cluster.disk_bytes_per_second
        # Gradients out, parameters back; the host reads and writes states at its memory's rate,
        # taken as that of the bus.
        moved = owned * (ACCUMULATED_BYTES + PARAMETER_BYTES + 2 * OPTIMIZER_BYTES) / host
        offload = np.where(layouts.offload >= 1, moved, 0.0)
        fetched = 2 * steps * PARAMETER_BYTES * np.where(zero >= 3, owned, parameters) / host
        offload = offload + np.where(layouts.offload >= 2, fetched, 0.0)
        on_node = np.minimum(layouts.devices, cluster.per_node)
        swapped = owned * 2 * OPTIMIZER_BYTES * on_node / disk
        return once + steps * each, offload + np.where(layouts.offload >= 3, swapped, 0.0)
