"""Bytes and collectives of models that transformers splits."""

from __future__ import annotations

from collections.abc import Iterable

from harness.cell.training import Layout
from harness.seam import Cell, ModelFacts
from harness.seam.formulas import all_reduced, hidden_bytes, passed_once
from harness.strategies._distributed import ADDED_UP, MeshSizes, any_block, named_sizes, plans_of
from harness.workloads import Workload


def exchange(
    cell: Cell, workload: Workload, sizes: MeshSizes, rows: float, numbers: bool = True
) -> float:
    """Returns bytes a rank sends per step to bring a layer's tokens to their experts, or back.
    `rows`: bytes of a rank's hidden states. With uniform routing, a share `1 / expert` of the
    tokens stays on its rank. `numbers` adds 8 bytes per expert and micro-batch for counts."""
    sent = rows / sizes.tensor * workload.experts_per_token
    counts = 8.0 * workload.experts * cell.micro_batches if numbers else 0.0
    return passed_once(sizes.expert, sent + counts)


def sharded_traffic(
    cell: Cell,
    layout: Layout,
    workload: Workload,
    sizes: MeshSizes,
    facts: ModelFacts,
    freed: Iterable[str],
    scatters: int = 1,
) -> float | None:
    """Returns bytes of FSDP's gathers and scatters and of token exchanges.

    FSDP2 gathers in every micro-batch, scatters gradients `scatters` times and all-reduces them
    once. Modules `freed` after forward are gathered again for backward. Experts are sharded among
    their ranks.
    """
    hidden = hidden_bytes(cell, layout)
    if hidden is None:
        return None
    plans, parts = plans_of(workload), cell.micro_batches
    twice = tuple(f"{path}." for path in freed)
    total = 0.0
    for name, size in named_sizes(facts):
        apart = sizes.expert > 1 and plans.is_expert(name)
        ranks = sizes.copies if apart else sizes.shards
        gathers = 2 if apart or name.startswith(twice) else 1
        shard_bytes = 4.0 * size / (sizes.expert if apart else 1)
        total += passed_once(ranks, (gathers * parts + scatters) * shard_bytes)
        total += all_reduced(sizes.replicas, shard_bytes / ranks)
    if sizes.expert > 1:
        total += workload.blocks * _exchanges(cell, workload, sizes, hidden)
    return total


def scatters_of(micro_batches: int, replicas: int) -> int:
    """Returns how often a step scatters gradients: with replicas, in every micro-batch."""
    return micro_batches if replicas > 1 else 1


def _exchanges(cell: Cell, workload: Workload, sizes: MeshSizes, hidden: float) -> float:
    forward = exchange(cell, workload, sizes, hidden) + exchange(
        cell, workload, sizes, hidden, numbers=False
    )
    backward = 2 * exchange(cell, workload, sizes, hidden, numbers=False)
    return forward * (2 if cell.recompute != "none" else 1) + backward


def tensor_traffic(
    cell: Cell, layout: Layout, workload: Workload, sizes: MeshSizes, facts: ModelFacts
) -> float | None:
    """Returns bytes of tensor parallelism without data parallelism.

    Hidden states are all-reduced in forward after the embedding and each row-wise layer, and in
    backward for each column-wise layer, including the head. The head's logits are gathered. Split
    experts reduce outputs and gradients of inputs and token weights. Whole experts exchange tokens
    (`exchange`) and gather outputs and gradients. A recomputed block repeats its forward
    collectives except the last.
    """
    hidden = hidden_bytes(cell, layout)
    if hidden is None:
        return None
    plans, ranks = plans_of(workload), sizes.tensor
    styles = {
        module: style
        for name, _ in named_sizes(facts)
        if (style := plans.tensor.get(any_block(module := name.rpartition(".")[0])))
        and not plans.is_expert(name)
    }
    again = cell.recompute != "none"
    rows = sum(style == "rowwise" for style in styles.values())
    # A tied head is split by column too, but has no parameter of its own.
    columns = sum(style.startswith("colwise") for style in styles.values()) + workload.tied
    repeated = (rows if workload.experts else rows - workload.blocks) if again else 0
    reduced = rows + columns + 1 + repeated
    added = sum(4.0 * size for name, size in named_sizes(facts) if plans.style(name) == ADDED_UP)
    logits = hidden / workload.hidden_size * workload.vocabulary
    total = all_reduced(ranks, reduced * hidden + added) + passed_once(ranks, logits)
    if not workload.experts:
        return total
    weights = hidden / workload.hidden_size * workload.experts_per_token
    if sizes.expert == 1:
        return total + workload.blocks * all_reduced(ranks, 2 * hidden + weights)
    gathered = passed_once(ranks, 2 * hidden + weights)
    return total + workload.blocks * (gathered + _exchanges(cell, workload, sizes, hidden))
