"""What strategies have in common in their formulas: bytes that a rank keeps and sends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from harness.spec.cell import Cell
from harness.spec.training import Layout, States
from harness.strategy.optimizers import optimizer_bytes
from harness.strategy.schedules import blocks_of_stage

if TYPE_CHECKING:
    from harness.workloads import Workload
    from harness.workloads.counts import ModelFacts


BESIDE_BACKWARD = 0.3
"""What a collective counts among a step's messages that runs beside backward, so that its rank
does not wait for it. Measured on CPU cores: 0.4 to 0.8 ms each, where one waited for takes 1.4."""

KEPT_RESULTS = 2
"""Buffers that DeepSpeed's last pipeline stage has for its results, and its first one at least for
its inputs (DeepSpeed 0.19, runtime/pipe/schedule.py, `num_pipe_buffers`)."""


def model_states(cell: Cell, facts: ModelFacts, shards: int = 1) -> States:
    """Parameters and optimizer state, cut into equal shards; gradients, sharded as they are, are
    freed by zero_grad.

    What the optimizer keeps: see `optimizer_bytes`. What the layers keep beside their parameters is
    whole on every rank.
    """
    return States(
        parameters=facts.parameter_bytes / shards,
        optimizer=optimizer_bytes(cell, facts) / shards,
        library=float(facts.buffer_bytes),
        transient=facts.trained_bytes / shards,
    )


def facts_of_part(facts: ModelFacts, share: Callable[[str], float]) -> ModelFacts | None:
    """The facts of a rank that holds a part of the model. `share`: what it holds of each parameter,
    by name, between 0 and 1. None where not all parameters are trained, whose names are not known.
    """
    if sum(facts.sizes) != facts.parameters:
        return None
    held = {
        name: round(size * share(name))
        for name, size in zip(facts.trainable, facts.sizes, strict=True)
    }
    of_whole = sum(held.values()) / facts.parameters
    return dataclasses.replace(
        facts,
        trainable=tuple(name for name, size in held.items() if size),
        sizes=tuple(size for size in held.values() if size),
        parameters=sum(held.values()),
        parameter_bytes=round(of_whole * facts.parameter_bytes),
        trained_bytes=round(of_whole * facts.trained_bytes),
    )


def facts_of_stages(
    workload: Workload,
    facts: ModelFacts,
    own: Collection[int],
    count: int,
    tensor_ranks: int = 1,
) -> ModelFacts | None:
    """The facts of a pipeline's rank that holds these of `count` stages, each layer of a block
    split over `tensor_ranks`; None where the model does not say how it is split."""
    split = workload.split
    if split is None:
        return None
    numbers = {block for stage in own for block in blocks_of_stage(workload.blocks, stage, count)}
    last = count - 1 in own
    # The last stage has a copy of its own of a parameter that is tied to the first's.
    tied = set(split.tied.values())

    def held(name: str) -> float:
        if name.startswith(f"{split.blocks}."):
            here = int(name.removeprefix(f"{split.blocks}.").partition(".")[0]) in numbers
            return here / (tensor_ranks if split.is_split(name) else 1)
        if name.startswith(tuple(f"{path}." for path in split.head)):
            return last
        return 0 in own or (last and name in tied)

    return facts_of_part(facts, held)


def received_bytes(stage: int, count: int, hidden: float) -> float:
    """What torch keeps for each stage: buffers in which it receives the hidden states, and those in
    which it receives their gradients, of all micro-batches."""
    return ((stage > 0) + (stage < count - 1)) * hidden


def a_stage_each(layout: Layout) -> list[tuple[int, ...]]:
    """Of each rank the numbers of its stages, where it has one."""
    return [(stage,) for stage in range(layout.pipeline)]


def pipeline_states(
    cell: Cell,
    layout: Layout,
    facts: ModelFacts,
    own: Sequence[Collection[int]],
    keeps: Callable[[Cell, ModelFacts], States] = model_states,
    buffers: Callable[[int, int, float], float] = received_bytes,
) -> States | None:
    """What the fullest rank of a pipeline keeps: the states of its stages, and buffers.

    `own`: of each rank the numbers of its stages; `keeps`: the states of a rank that holds a part
    of the model with these facts; `buffers`: bytes of a stage's buffers, of its number, the number
    of stages, and the bytes of the hidden states of all of a rank's samples.
    """
    from harness.workloads import make_workload

    hidden, count = hidden_bytes(cell, layout), sum(map(len, own))
    if hidden is None:
        return None
    workload = make_workload(cell.workload)
    fullest: States | None = None
    for stages in own:
        part = facts_of_stages(workload, facts, stages, count, layout.tensor)
        if part is None:
            return None
        states = keeps(cell, part)
        in_buffers = sum(buffers(stage, count, hidden) for stage in stages)
        states = dataclasses.replace(states, library=states.library + in_buffers)
        if fullest is None or states.total > fullest.total:
            fullest = states
    return fullest


def whole_model_states(cell: Cell, facts: ModelFacts) -> States:
    """DDP: everything on every rank, and the buckets that gradients are averaged in."""
    states = model_states(cell, facts)
    return dataclasses.replace(states, library=states.library + facts.trained_bytes)


def all_reduced(ranks: int, size: float) -> float:
    """Bytes that each rank must send for an all-reduce of `size` bytes (see
    harness/measure/collectives.py)."""
    return 2 * passed_once(ranks, size)


def passed_once(ranks: int, size: float) -> float:
    """The same for a reduce-scatter, an all-gather or, mean of the ranks, a broadcast."""
    return (ranks - 1) / ranks * size


def hidden_bytes(cell: Cell, layout: Layout) -> float | None:
    """Bytes of the hidden states between two blocks, of all samples that a rank sees in a step;
    None where the dtype may change."""
    from harness.workloads import make_workload

    if cell.precision != "fp32":
        return None
    hidden = make_workload(cell.workload).hidden_size
    return 4.0 * cell.global_batch // layout.data * cell.sequence_length * hidden


def logits_bytes(workload: Workload, samples: int, tokens: int) -> float:
    """Bytes of the model's result for this many samples, in fp32."""
    return 4.0 * samples * (workload.num_labels or tokens * workload.vocabulary)


def dealt_out_states(states: States, facts: ModelFacts, ranks: int) -> States:
    """These with the optimizer's state of whole parameters dealt out to ranks, largest first, as
    ZeroRedundancyOptimizer does it; those of the fullest rank."""
    share = fullest_share(sorted(facts.sizes, reverse=True), ranks) / sum(facts.sizes)
    return dataclasses.replace(states, optimizer=states.optimizer * share)


def fullest_share(sizes: Iterable[int], ranks: int) -> int:
    """Elements of the fullest rank when whole tensors are dealt out, each to the rank that has
    fewest so far."""
    shares = [0] * ranks
    for size in sizes:
        shares[shares.index(min(shares))] += size
    return max(shares)
