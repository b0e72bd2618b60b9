"""A rank's peak memory in closed form, for questions about thousands of cells.

Questions about one cell rehearse it instead (harness/planner/rehearsal), which
tests/unit/test_peak_memory.py holds against this.
"""

from __future__ import annotations

import dataclasses

from harness.cell.cell import Cell
from harness.cell.training import States
from harness.seam.base import Emulation
from harness.seam.formulas import model_states, whole_model_states
from harness.seam.registry import make_strategy
from harness.workloads import make_workload
from harness.workloads.counts import model_facts

CONTEXT_BYTES = 2**30
"""Estimated memory of a process's CUDA context and kernels on each GPU."""


def states_by_formula(cell: Cell) -> States | None:
    """Returns what the fullest rank keeps between steps; None if the strategy has no formula."""
    strategy = make_strategy(cell)
    facts = model_facts(make_workload(cell.workload))
    return strategy.states(cell, strategy.layout(cell.devices), facts)


def states_or_bound(cell: Cell) -> States:
    """Returns the formula's states. Without a formula, returns a bound: the states in fp32, or
    those of whole models with buckets."""
    if states := states_by_formula(cell):
        return states
    if states := states_by_formula(cell.model_copy(update={"precision": "fp32"})):
        return states
    strategy, facts = make_strategy(cell), model_facts(make_workload(cell.workload))
    if isinstance(strategy, Emulation):
        return model_states(cell, facts, 1 / strategy.emulated_ranks)
    return whole_model_states(cell, facts) if cell.devices > 1 else model_states(cell, facts)


def activation_bytes(cell: Cell) -> float:
    """Returns the peak bytes of activations on a device of the fullest rank.

    Without a count for a layout, it is that of a rank with the whole model.
    """
    strategy, workload = make_strategy(cell), make_workload(cell.workload)
    layout = strategy.layout(cell.devices)
    counted = strategy.activation_bytes(cell, layout, workload)
    if counted is None:
        whole = dataclasses.replace(layout, pipeline=1, tensor=1)
        counted = strategy.counted_activations(cell, whole, workload)
    return counted / layout.devices_per_process


def peak_bytes(cell: Cell, activations: float | None = None) -> float:
    """Returns the bytes of the fullest rank's tensors at the peak of a step.

    Adds the larger of activations and temporary memory to the states, since gradients grow as
    activations are freed (ZeRO, arXiv 1910.02054, section 3). Gathered parameters are there from
    the beginning of backward, and so are all gradients from the second micro-batch on. With
    recomputation, one block's activations remain until the last gradient. `activations`: those of
    the cell, if the caller has counted them.
    """
    states = states_or_bound(cell)
    held = activation_bytes(cell) if activations is None else activations
    strategy = make_strategy(cell)
    layout = strategy.layout(cell.devices)
    if states.gradients:
        at_once = 0.0
    elif cell.micro_batches > 1 or layout.pipeline > 1:
        at_once = held
    elif strategy.shards_parameters:
        at_once = held - model_facts(make_workload(cell.workload)).trained_bytes / layout.data
    elif cell.recompute != "none":
        at_once = _of_one_block(cell)
    else:
        at_once = 0.0
    if cell.loss == "torch_linear":
        # It computes the head's gradient in forward, and keeps it until the graph is freed.
        workload = make_workload(cell.workload)
        element_bytes = 4.0 if cell.precision == "fp32" else 2.0
        at_once += element_bytes * workload.vocabulary * workload.hidden_size
    return states.total + max(held, states.transient + at_once)


def _of_one_block(cell: Cell) -> float:
    strategy = make_strategy(cell)
    shallow = make_workload(cell.workload).with_blocks(1)
    if shallow is None:
        return 0.0
    return strategy.activation_bytes(cell, strategy.layout(cell.devices), shallow) or 0.0
