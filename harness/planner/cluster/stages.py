"""How the layers of a model are dealt out to the stages of a pipeline."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from harness.planner.cluster.model_shape import ModelShape

FULL = 0.997
"""Share of its part of the cost at which a stage is full. Above 1 in nanotron's source; measured
step times of 32 layers in 16 stages need this rounding, other layouts do not depend on it."""


@dataclass(frozen=True)
class Stage:
    """Stages of a pipeline that hold the same modules."""

    layers: int
    embedding: bool
    head: bool
    first: int
    """Number of the first of them, from 0: it has the most micro-batches in flight."""
    count: int
    """How many of them."""


@functools.lru_cache(maxsize=4096)
def stages(shape: ModelShape, pipeline: int) -> tuple[Stage, ...]:
    """The kinds of stages of a pipeline."""
    return tuple(stage for stage, _ in numbered_stages(shape, pipeline))


@functools.lru_cache(maxsize=4096)
def numbered_stages(shape: ModelShape, pipeline: int) -> tuple[tuple[Stage, list[int]], ...]:
    """The kinds of stages of a pipeline, balanced by cost, and the numbers of each; a stage without
    modules has nothing to do.

    Layers and head are dealt out in order; a stage is full once the cost so far passes its share
    of the total, cost being the parameters that a token passes through (nanotron,
    `build_model` and `get_block_compute_costs`). Equal numbers of layers are taken instead where
    they divide and the slowest stage is faster so (Megatron-LM).
    """
    layer = shape.attention_parameters + shape.experts_per_token * shape.expert_parameters
    head = shape.embedding_parameters
    total = shape.layers * layer + head
    counts = [0] * pipeline
    place, cost = 0, 0
    for _ in range(shape.layers):
        counts[place] += 1
        cost += layer
        if place < pipeline - 1 and cost * pipeline > FULL * total * (place + 1):
            place += 1
    head_stage = place
    slowest = max(
        count * layer + (head if stage == head_stage else 0) for stage, count in enumerate(counts)
    )
    equal = shape.layers // pipeline
    if shape.layers % pipeline == 0 and equal * layer + head < slowest:
        counts, head_stage = [equal] * pipeline, pipeline - 1
    kinds: dict[tuple[int, bool, bool], list[int]] = {}
    for number, layers in enumerate(counts):
        kinds.setdefault((layers, number == 0, number == head_stage), []).append(number)
    return tuple(
        (Stage(layers, embedding, has_head, numbers[0], len(numbers)), numbers)
        for (layers, embedding, has_head), numbers in kinds.items()
    )


@functools.lru_cache(maxsize=4096)
def empty_stages(shape: ModelShape, pipeline: int) -> int:
    """Stages that hold nothing: no layer, no head, and not the loss, which follows the head."""
    empty = sum(
        stage.count
        for stage in stages(shape, pipeline)
        if not (stage.layers or stage.embedding or stage.head)
    )
    return max(0, empty - 1)
