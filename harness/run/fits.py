"""Checks whether trials that share GPU memory fit together."""

from __future__ import annotations

from collections.abc import Sequence

from harness.parity.reference_runs import CONTEXT_BYTES
from harness.spec.cell import Cell
from harness.strategy.formulas import model_states
from harness.strategy.registry import validate
from harness.workloads import make_workload
from harness.workloads.counts import model_facts

GIB = 2**30


def device_bytes(cell: Cell) -> float:
    """Returns the approximate bytes that a trial holds per GPU from its first step on, even while
    another one trains.

    Sums the strategy's formula for states and temporary memory, its share of a micro-batch's
    activations (torch's allocator keeps them), and the CUDA context.
    """
    from harness.workloads.operators import activation_bytes

    workload = make_workload(cell.workload)
    strategy, layout = validate(cell, workload)
    facts = model_facts(workload, cell.sequence_length)
    states = strategy.costs.states(cell, layout, facts) or model_states(cell, facts)
    samples = max(1, cell.global_batch // cell.micro_batches)
    held = activation_bytes(workload, samples, cell.sequence_length, cell.recompute)
    activations = held / cell.devices
    return states.total + states.transient + activations + CONTEXT_BYTES


def too_large_together(cells: Sequence[Cell], gpu_bytes: int) -> str:
    """Returns why these trials do not fit one GPU together and what to leave out; empty if they
    fit."""
    sizes = {cell.name: device_bytes(cell) for cell in cells}
    total = sum(sizes.values())
    if total <= gpu_bytes:
        return ""
    remaining, left_out = total, []
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if remaining <= gpu_bytes:
            break
        remaining -= sizes[name]
        left_out.append(f"{name!r} ({sizes[name] / GIB:.1f} GiB)")
    need = (
        f"together they need about {total / GIB:.1f} GiB of each GPU, which has"
        f" {gpu_bytes / GIB:.1f} GiB"
    )
    return (
        f"all launches are in memory at once, and {need}: leave {', '.join(left_out)} out, or make"
        " the batch smaller"
    )
