"""QLoRA on sharded weights trains as in one process, in half the memory."""

from __future__ import annotations

from typing import Any

import pytest

from harness.cell.cell import Cell
from harness.seam.registry import validate
from harness.workloads import make_workload
from harness.workloads.counts import model_facts
from tests.ranks.conftest import RunCells, cell
from tests.ranks.test_variants import EXACT, holds_what_the_formula_says, verdict

QLORA = "llama-nano+nf4+lora"


def test_packed_weights_are_sharded_and_train_the_same(run_cells: RunCells) -> None:
    sharded: list[dict[str, Any]] = [
        {"strategy": "fsdp1"},
        {"strategy": "fsdp2", "micro_batches": 2},
        {"strategy": "deepspeed", "options": {"stage": 3, "persistent_elements": 0}},
        {"strategy": "accelerate", "options": {"engine": "fsdp2"}},
    ]
    trials = run_cells(*(cell(workload=QLORA, **axes) for axes in sharded)).trials
    whole = model_facts(make_workload(QLORA), 32).parameter_bytes
    for _, trial in trials.iterrows():
        assert verdict(trial) == EXACT, trial["reason"] + trial["log_tail"]
        assert trial["parameter_bytes"][0] == pytest.approx(whole / 2, rel=0.02)
        if trial["strategy"] == "fsdp2":  # others shard unevenly or keep buffers
            holds_what_the_formula_says(trial)


def test_a_cast_of_packed_weights_is_to_the_type_that_they_are_stored_as(
    run_cells: RunCells,
) -> None:
    """FSDP2 casts each gathered parameter, which would corrupt weights packed as fp32."""
    mixed = cell("fsdp2", workload=QLORA, precision="bf16", options={"mixed_precision": True})
    (trial,) = run_cells(mixed).trials.to_dict("records")
    assert trial["status"] == "ok", trial["reason"]


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
