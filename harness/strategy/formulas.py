"""What strategies have in common in their formulas: bytes that a rank keeps and sends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from harness.spec.cell import Cell
from harness.spec.training import Layout, States
from harness.strategy.optimizers import optimizer_bytes

if TYPE_CHECKING:
    from harness.workloads.counts import ModelFacts


BESIDE_BACKWARD = 0.3
"""What a collective counts among a step's messages that runs beside backward, so that its rank
does not wait for it. Measured on CPU cores: 0.4 to 0.8 ms each, where one waited for takes 1.4."""


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


def fullest_share(sizes: Iterable[int], ranks: int) -> int:
    """Elements of the fullest rank when whole tensors are dealt out, each to the rank that has
    fewest so far."""
    shares = [0] * ranks
    for size in sizes:
        shares[shares.index(min(shares))] += size
    return max(shares)
