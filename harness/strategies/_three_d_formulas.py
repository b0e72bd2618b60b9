"""Formulas of what a rank of 3D parallelism keeps on its data axis."""

from __future__ import annotations

from harness.strategy import Cell, ModelFacts, States, model_states, whole_model_states
from harness.strategy.formulas import dealt_out_states


def axis_states(cell: Cell, part: ModelFacts, axis: str, ranks: int) -> States:
    """Bytes that a rank keeps which holds this part of the model, shared with as many `ranks` of
    the data axis.

    FSDP2 shards parameters, gradients and moments in equal parts (ZeRO-3, arXiv 1910.02054, section
    5); ZeroRedundancyOptimizer deals out the moments of whole parameters; DDP adds the buckets in
    which it averages gradients.
    """
    if axis == "fsdp2":
        return model_states(cell, part, shards=ranks)
    if axis == "ddp":
        return whole_model_states(cell, part)
    states = model_states(cell, part)
    return dealt_out_states(states, part, ranks) if axis == "zero1" else states
