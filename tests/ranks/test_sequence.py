"""Sequence parallelism is exact with each sample's tokens on several ranks; traps are caught."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.conftest import RunCells, cell
from tests.ranks.test_strategies import states_follow_the_formula

pytest.importorskip("deepspeed", reason="make setup builds DeepSpeed")
SGD: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.05, "weight_decay": 0.0}
"""SGD, whose update shows a gradient's scale; AdamW's hides it."""
ONE_STEP: dict[str, Any] = {"parity_steps": 1, "warmup_steps": 1, "timed_steps": 2}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_have_the_right_scale_in_each_stage_of_zero(
    run_cells: RunCells, stage: int
) -> None:
    """Stages 0 to 2 divide by the data-parallel ranks only, which would double updates here."""
    axes = {"options": {"stage": stage}, **ONE_STEP, **SGD}
    strategies = ["ulysses_zero"] + ["unscaled_ulysses"] * (stage < 3)
    trials = run_cells(*(cell(name, **axes) for name in strategies)).trials.set_index("strategy")
    right = trials.loc["ulysses_zero"]
    assert right["parity_verdict"] == "exact", right["reason"]
    assert right["parity_max_update_deviation"] < 1e-4
    states_follow_the_formula(right)
    if stage < 3:
        wrong = trials.loc["unscaled_ulysses"]
        assert wrong["parity_verdict"] == "diverged"
        assert wrong["parity_max_update_deviation"] == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    "axes",
    [
        {"workload": "gpt2-nano", "micro_batches": 2, "recompute": "full"},
        {"devices": 4, "options": {"sequence_ranks": 2}, "workload": "qwen3-moe-nano"},
    ],
    ids=str,
)
def test_it_is_the_same_training(run_cells: RunCells, axes: dict[str, Any]) -> None:
    trial = run_cells(cell("ulysses", **axes)).trials.iloc[0]
    assert trial["parity_verdict"] == "exact", trial["reason"]
    assert trial["sequence_parallel"] == 2
    states_follow_the_formula(trial)


@pytest.mark.parametrize("without", ["positions", "averaged_gradients"])
def test_each_trap_is_caught(run_cells: RunCells, without: str) -> None:
    trial = run_cells(cell("ulysses_traps", options={"without": without})).trials.iloc[0]
    assert trial["status"] == "diverged", trial["reason"]


def test_a_ring_of_ranks_trains_the_same(run_cells: RunCells) -> None:
    """torch supports its ring attention on GPUs only; here it runs over the attention of CPUs."""
    cells = [
        cell("ring_on_cpu", workload="qwen3-moe-nano", options={"pass_by": way}, **SGD)
        for way in ("allgather", "alltoall")
    ]
    trials = run_cells(*cells).trials
    assert set(trials["parity_verdict"]) == {"exact"}, list(trials["reason"])
