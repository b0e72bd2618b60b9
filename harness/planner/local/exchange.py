"""What a cell's ranks exchange and whose library does it, as the planner of this machine needs
it."""

from __future__ import annotations

import dataclasses

from harness.spec.cell import Cell
from harness.spec.training import EXACT, Layout, States
from harness.strategy.base import Strategy
from harness.strategy.formulas import BESIDE_BACKWARD, all_reduced, passed_once
from harness.workloads import Workload
from harness.workloads.counts import ModelFacts


def divided(states: States, parts: int) -> States:
    return States(
        **{field.name: getattr(states, field.name) / parts for field in dataclasses.fields(states)}
    )


def sent_bytes(
    cell: Cell, strategy: Strategy, layout: Layout, facts: ModelFacts, workload: Workload
) -> float:
    """Bytes that a rank sends in a step, by the strategy's formula.

    All of a parameter server's pass through one process, for which the ranks wait. Without a
    formula, by what the layout must exchange, once a cycle: on the data axis averages of the
    gradients, half as much again where parameters are sharded (ZeRO, arXiv 1910.02054, section 7);
    on the tensor axis four all-reduces of the hidden states in each block (Megatron-LM, arXiv
    1909.08053, section 3); between stages hidden states forward and their gradients back.
    """
    if layout.servers:
        return strategy.moved_bytes(cell, layout, facts)
    known = strategy.traffic(cell, layout, facts)
    if known is not None:
        return known
    trained = facts.trained_bytes / (layout.pipeline * layout.tensor)
    total = passed_once(layout.data, trained * (3.0 if strategy.shards_parameters else 2.0))
    if layout.tensor > 1 or layout.pipeline > 1:
        hidden = 4.0 * cell.global_batch / layout.data * cell.sequence_length * workload.hidden_size
        total += all_reduced(layout.tensor, 4 * workload.blocks / layout.pipeline * hidden)
        total += passed_once(layout.pipeline, 2 * hidden)
    alone = 1 if strategy.tolerance(cell, workload) == EXACT else strategy.cycle
    return total / alone


def engine_of(strategy: Strategy, name: str) -> str:
    """The strategy whose library does the work beside the model's own."""
    library = strategy.library or name
    return f"{library}, sharded" if strategy.shards_parameters else library


def optimizer_flops(cell: Cell, workload: Workload, facts: ModelFacts) -> float:
    """Floating-point operations of a rank's update by matrix products: Muon's five Newton-Schulz
    iterations (https://kellerjordan.github.io/posts/muon/), each 4 n^2 m + 2 n^3 for a matrix of n
    x m elements, n <= m. Matrices are those with a side of the hidden size; a smaller parameter is
    none."""
    if cell.optimizer != "muon":
        return 0.0
    hidden = workload.hidden_size
    sides = [sorted((hidden, size // hidden)) for size in facts.sizes if size >= hidden**2]
    return float(sum(5 * (4 * n * n * m + 2 * n**3) for n, m in sides))


def messages(
    cell: Cell, strategy: Strategy, layout: Layout, facts: ModelFacts, blocks: int
) -> float:
    """Collectives and transfers of a step, by the strategy's formula.

    Without one, by what the layout must exchange: of the tensor axis four in each block
    (Megatron-LM, arXiv 1909.08053, section 3), of a pipeline one forward and one backward for each
    micro-batch, whose wait is the schedule's, of the data axis one, or three for each block where
    parameters are sharded.
    """
    known = strategy.messages(cell, layout, facts) if layout.devices > 1 else 0.0
    if known is not None:
        return known
    count = 0.0
    if layout.tensor > 1:
        count += 4.0 * blocks * cell.micro_batches / layout.pipeline
    if layout.pipeline > 1:
        count += 2.0 * BESIDE_BACKWARD * cell.micro_batches
    if layout.data > 1:
        sharded = 3.0 * (blocks + 1) * cell.micro_batches
        count += sharded if strategy.shards_parameters else 1.0
    return count
