"""A strategy that trains something else is reported diverged, and the same strategy without the mistake is exact."""

from __future__ import annotations

import pytest

from tests.ranks.conftest import RunCells, cell

MISTAKES = (
    "no_synchronization scaled_loss summed_gradients clipping repeated_batch lost_micro_batch other_seed frozen_tensor no_weight_decay"
).split()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_broken_strategy_is_reported_diverged(run_cells: RunCells, mistake: str) -> None:
    trial = run_cells(cell("broken", options={"mistake": mistake})).trials.iloc[0]
    assert trial["status"] == "diverged"
    assert trial["parity_verdict"] == "diverged"
    assert trial["reason"]


def test_the_same_strategy_without_a_mistake_is_exact(run_cells: RunCells) -> None:
    trial = run_cells(cell("broken")).trials.iloc[0]
    assert (trial["status"], trial["parity_verdict"]) == ("ok", "exact")
    assert trial["parity_max_loss_deviation"] <= 1e-6


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("mistake", ["no_synchronization", "summed_gradients", "repeated_batch"])
def test_low_precision_hides_no_mistake(run_cells: RunCells, precision: str, mistake: str) -> None:
    trials = run_cells(
        cell("ddp", precision=precision), cell("broken", precision=precision, options={"mistake": mistake})
    ).trials.set_index("strategy")
    assert trials.loc["ddp", "status"] == "ok"
    assert trials.loc["broken", "status"] == "diverged"


def test_a_strategy_of_another_installed_package_runs(run_cells: RunCells) -> None:
    trial = run_cells(cell("outside")).trials.iloc[0]
    assert (trial["status"], trial["parity_verdict"]) == ("ok", "exact")
