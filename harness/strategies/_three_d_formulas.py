"""Formulas of 3D parallelism's data axis."""

from __future__ import annotations

from harness.strategy import Cell, ModelFacts, States, model_states, whole_model_states
from harness.strategy.formulas import dealt_out_states


def axis_states(cell: Cell, part: ModelFacts, axis: str, ranks: int) -> States:
    """Returns the states of a rank that shares this part of the model with `ranks` ranks on the
    data axis.

    FSDP2 shards all states equally (ZeRO-3, arXiv 1910.02054, section 5). ZeroRedundancyOptimizer
    shards moments by whole parameters; DDP adds gradient buckets.
    """
    if axis == "fsdp2":
        return model_states(cell, part, shards=ranks)
    if axis == "ddp":
        return whole_model_states(cell, part)
    states = model_states(cell, part)
    return dealt_out_states(states, part, ranks) if axis == "zero1" else states
