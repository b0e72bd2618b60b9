"""Formulas of transformers' `DistributedConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from harness.strategies._distributed_config import ADDED_UP, Sizes, any_block, plans_of
from harness.strategy import (
    Cell,
    Layout,
    ModelFacts,
    States,
    Workload,
    all_reduced,
    model_states,
    passed_once,
)
from harness.strategy.formulas import hidden_bytes


def mesh_states(cell: Cell, workload: Workload, sizes: Sizes, facts: ModelFacts) -> States:
    """Returns each rank's states: its parts of parameters, gradients and moments under the
    plans."""
    plans = plans_of(workload)

    def parts(name: str) -> int:
        if sizes.expert > 1 and plans.is_expert(name):
            return sizes.shards * sizes.tensor
        split = sizes.tensor > 1 and plans.style(name) not in (None, ADDED_UP, "replicate")
        return sizes.shards * (sizes.tensor if split else 1)

    held = sum(size / parts(name) for name, size in _named(facts))
    states, share = model_states(cell, facts), held / sum(facts.sizes)
    return dataclasses.replace(
        states,
        parameters=share * states.parameters,
        optimizer=share * states.optimizer,
        transient=share * states.transient,
    )


def _named(facts: ModelFacts) -> Iterator[tuple[str, int]]:
    return zip(facts.trainable, facts.sizes, strict=True)


def exchange(
    cell: Cell, workload: Workload, sizes: Sizes, rows: float, numbers: bool = True
) -> float:
    """Returns bytes a rank must send per step, averaged over ranks, to bring one layer's tokens to
    their experts or back.

    `rows`: bytes of hidden states of all samples a rank sees in a step, sent to each expert of a
    token. With uniform routing, `1 / expert` stay on the rank. `numbers`: include token counts, 8
    bytes per expert and micro-batch.
    """
    sent = rows / sizes.tensor * workload.experts_per_token
    counts = 8.0 * workload.experts * cell.micro_batches if numbers else 0.0
    return passed_once(sizes.expert, sent + counts)


def sharded_traffic(
    cell: Cell,
    layout: Layout,
    workload: Workload,
    sizes: Sizes,
    facts: ModelFacts,
    reductions: int | None = None,
) -> float | None:
    """Returns bytes without tensor parallelism: FSDP's gathers and scatters, and token exchanges
    with experts.

    FSDP2 gathers in every micro-batch, and reduces gradients `reductions` times, by default as
    often. Final norm and head stay gathered until backward. Experts are sharded among ranks that
    hold the same ones.
    """
    hidden = hidden_bytes(cell, layout)
    if hidden is None:
        return None
    plans, parts = plans_of(workload), cell.micro_batches
    reduced = reductions or parts
    total = 0.0
    for name, size in _named(facts):
        apart = sizes.expert > 1 and plans.is_expert(name)
        ranks = sizes.copies if apart else sizes.shards
        gathers = 2 if apart or plans.gathered_twice(name) else 1
        own = 4.0 * size / (sizes.expert if apart else 1)
        total += passed_once(ranks, (gathers * parts + reduced) * own)
        total += reduced * all_reduced(sizes.replicas, own / ranks)
    if sizes.expert > 1:
        total += workload.blocks * _exchanges(cell, workload, sizes, hidden)
    return total


def _exchanges(cell: Cell, workload: Workload, sizes: Sizes, hidden: float) -> float:
    """Returns bytes of a layer's exchanges with experts per step, with any recomputation."""
    forward = exchange(cell, workload, sizes, hidden) + exchange(
        cell, workload, sizes, hidden, numbers=False
    )
    backward = 2 * exchange(cell, workload, sizes, hidden, numbers=False)
    return forward * (2 if cell.recompute != "none" else 1) + backward


def tensor_traffic(
    cell: Cell, layout: Layout, workload: Workload, sizes: Sizes, facts: ModelFacts
) -> float | None:
    """Returns bytes without data parallelism.

    Hidden states are all-reduced forward after the embedding and each layer split by row, and
    backward for each split by column. The head is one of these; its logits are gathered.

    Experts split like an MLP reduce outputs forward, and gradients of inputs and token weights
    backward. Ranks with whole experts send a share of the tokens each (`exchange`) and gather
    outputs and gradients. A recomputed block repeats its forward collectives except the last.
    """
    hidden = hidden_bytes(cell, layout)
    if hidden is None:
        return None
    plans, ranks = plans_of(workload), sizes.tensor
    styles = {
        module: style
        for name, _ in _named(facts)
        if (style := plans.tensor.get(any_block(module := name.rpartition(".")[0])))
        and not plans.is_expert(name)
    }
    again = cell.recompute != "none"
    rows = sum(style == "rowwise" for style in styles.values())
    columns = sum(style.startswith("colwise") for style in styles.values())
    repeated = (rows if workload.experts else rows - workload.blocks) if again else 0
    reduced = rows + columns + 1 + repeated
    added = sum(4.0 * size for name, size in _named(facts) if plans.style(name) == ADDED_UP)
    logits = hidden / workload.hidden_size * workload.vocabulary
    total = all_reduced(ranks, reduced * hidden + added) + passed_once(ranks, logits)
    if not workload.experts:
        return total
    weights = hidden / workload.hidden_size * workload.experts_per_token
    if sizes.expert == 1:
        return total + workload.blocks * all_reduced(ranks, 2 * hidden + weights)
    gathered = passed_once(ranks, 2 * hidden + weights)
    return total + workload.blocks * (gathered + _exchanges(cell, workload, sizes, hidden))
