"""Recomputation in real ranks trains the same in less memory."""

from __future__ import annotations

from typing import Any

import pytest

from harness.cell.cell import Cell
from harness.cell.errors import Refused
from harness.launch.launcher import Launcher
from harness.run.profile import profile_cell
from harness.seam.peak_memory import peak_bytes
from harness.seam.registry import validate
from harness.workloads import make_workload
from harness.workloads.counts import model_facts
from tests.ranks.conftest import RunCells, cell, representative

CELLS: dict[str, dict[str, Any]] = {
    "fsdp2": {"strategy": "fsdp2"},
    "tensor": {"strategy": "tensor"},
    "pipeline": {"strategy": "pipeline", "micro_batches": 4},
    "zero3": {"strategy": "deepspeed", "options": {"stage": 3}},
    "trainer": {"strategy": "trainer"},
    "fairscale": {"strategy": "fairscale_oss"},
}


@pytest.mark.parametrize("name", representative(CELLS))
def test_it_is_the_same_training_in_less_memory_with_more_operations(
    run_cells: RunCells, name: str
) -> None:
    """Memory falls and hardware FLOPs rise from none to selective to full; model FLOPs are equal.

    Refused combinations are skipped (see tests/unit/test_recompute.py).
    """
    large = {
        "workload": "llama-128x4",
        "global_batch": 8,
        "sequence_length": 128,
        "warmup_steps": 1,
        "timed_steps": 1,
        "parity_steps": 2,
    }
    cells = []
    for recompute in ("none", "selective", "full"):
        one = cell(**{**large, **CELLS[name]}, recompute=recompute)
        try:
            validate(one, make_workload(one.workload))
        except Refused:
            continue
        cells.append(one)
    trials = run_cells(*cells).trials
    assert list(trials["status"]) == ["ok"] * len(cells), list(trials["reason"])
    assert set(trials["parity_verdict"]) == {"exact"}
    by_kind = trials.set_index("recompute").loc[[one.recompute for one in cells]]
    assert {"none", "full"} <= set(by_kind.index)
    assert by_kind["peak_memory_bytes"].is_monotonic_decreasing
    assert by_kind["peak_memory_bytes"].is_unique
    assert by_kind["hardware_flops_per_step"].is_monotonic_increasing
    assert by_kind["hardware_flops_per_step"].is_unique
    assert by_kind["flops_per_step"].nunique() == 1
    assert by_kind.loc["none", "hardware_flops_per_step"] == by_kind.loc["none", "flops_per_step"]


PEAKS: dict[str, dict[str, Any]] = {
    "sequence": {"strategy": "tensor", "options": {"sequence_parallel": True}},
    "three_d": {
        "strategy": "three_d",
        "devices": 4,
        "micro_batches": 4,
        "options": {"tensor": 1, "data_axis": "fsdp2"},
    },
    # With `full`, torch's tracker sees more than the allocator in the last stage, the fullest.
    "deepspeed_pipeline": {
        "strategy": "deepspeed_pipeline",
        "micro_batches": 4,
        "recompute": "selective",
    },
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_of_each_rank_follows_the_formula(launcher: Launcher, name: str) -> None:
    """The fullest rank's tensors at the peak of a step are within 5% of the formula.

    tests/unit/test_recompute.py covers one process and other kinds of recomputation.
    """
    sizes = {"workload": "llama-128x4", "sequence_length": 128, "global_batch": 8}
    one = cell(**{"recompute": "full", **sizes, **PEAKS[name]})
    row = profile_cell(launcher, "run", one)
    assert row.status == "ok", row.reason
    assert max(row.peak_tracked_bytes) == pytest.approx(peak_bytes(one), rel=0.05)


@pytest.mark.thorough
@pytest.mark.parametrize(("strategy", "micro_batches"), [("fsdp2", 1), ("fsdp2", 2), ("fsdp1", 1)])
def test_gradients_before_their_reduction_are_counted(
    launcher: Launcher, strategy: str, micro_batches: int
) -> None:
    """With few tokens, the fullest rank's peak is within 6% of the states and transient bytes."""
    few = {"workload": "llama-256x4", "sequence_length": 8, "global_batch": 2 * micro_batches}
    one = cell(strategy, micro_batches=micro_batches, **few)
    row = profile_cell(launcher, "run", one)
    assert row.status == "ok", row.reason
    made, layout = validate(one, make_workload(one.workload))
    states = made.states(one, layout, model_facts(make_workload(one.workload), 8))
    assert states is not None
    needed = states.total + states.transient
    assert max(row.peak_tracked_bytes) == pytest.approx(needed, rel=0.06)


@pytest.mark.parametrize(("micro_batches", "gradients"), [(1, 1.25), (2, 1.5)])
def test_fsdp1_has_gradients_of_frozen_parameters(micro_batches: int, gradients: float) -> None:
    """Adapters are in two blocks, which are gathered together. One block's gradients are whole; the
    other's are copied, and sharded after the only micro-batch."""
    lora = Cell(
        strategy="fsdp1", devices=2, workload="llama-nano+lora", micro_batches=micro_batches
    )
    workload = make_workload(lora.workload)
    strategy, layout = validate(lora, workload)
    facts = model_facts(workload, 32)
    states = strategy.states(lora, layout, facts)
    assert states is not None
    assert states.transient == (1 + gradients) * facts.parameter_bytes
