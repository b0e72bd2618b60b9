"""The control between the steps: what it records, what it leaves alone, and what cannot hide in
it."""

from __future__ import annotations

import pytest

from harness.record.trial import TrialRecord
from tests.ranks.conftest import RunCells, cell

LATER_MISTAKES = [
    "skipped_steps",
    "no_synchronization",
    "frozen_update",
    "repeated_batch",
    "lost_micro_batch",
    "lower_precision",
]


def test_steps_are_taken_by_time_with_a_control_after_each(run_cells: RunCells) -> None:
    results = run_cells(cell("ddp"), timed_seconds=0.5)
    (trial,) = TrialRecord.from_frame(results.trials)
    assert (trial.status, trial.parity_verdict) == ("ok", "exact"), trial.log_tail
    timed = results.steps[results.steps["phase"] == "timed"]
    by_rank = timed.groupby("rank")["step"].agg(list)
    assert by_rank[0] == by_rank[1]
    count = len(by_rank[0])
    assert count > 5
    seconds = timed.groupby("step")["step_seconds"].max().sum()
    assert seconds > 0.25 or count == 200  # steps may get faster after their time was agreed
    assert (timed["control_seconds"] > 0).all()
    assert (timed["left_over_seconds"] < 0.2 * timed["step_seconds"]).mean() > 0.8
    assert len(trial.window_step_seconds) == max(1, count // 8)
    slowest = zip(trial.window_slowest_control_seconds, trial.window_control_seconds, strict=True)
    assert all(most >= mean for most, mean in slowest)
    assert trial.later_steps_verified == len(trial.losses) - 8
    assert trial.later_loss_deviation is not None
    assert trial.later_loss_deviation < 1e-4


def test_memory_and_traffic_are_those_without_a_control(run_cells: RunCells) -> None:
    (plain,) = TrialRecord.from_frame(run_cells(cell("ddp")).trials)
    (beside,) = TrialRecord.from_frame(run_cells(cell("ddp"), timed_seconds=0.1).trials)
    assert plain.peak_memory_bytes
    assert beside.peak_memory_bytes
    assert beside.peak_memory_bytes <= 1.05 * plain.peak_memory_bytes
    assert beside.sent_bytes_per_step == pytest.approx(plain.sent_bytes_per_step, rel=0.05)
    assert beside.foreign_load_cores is not None


def test_work_in_a_thread_after_the_step_is_the_steps(run_cells: RunCells) -> None:
    hidden = cell("hidden", options={"milliseconds": 20.0, "in_thread": True})
    timed = run_cells(hidden, timed_seconds=0.5).steps.query("phase == 'timed'")
    # What does not fit into the pause runs beside the next step.
    assert timed["left_over_seconds"].median() > 0.002


def test_cells_on_several_ranks_that_share_a_core_go_on(run_cells: RunCells) -> None:
    (trial,) = TrialRecord.from_frame(run_cells(cell("ddp", devices=4), timed_seconds=0.2).trials)
    assert trial.status == "ok", trial.log_tail
    assert trial.window_control_seconds


@pytest.mark.parametrize("mistake", LATER_MISTAKES)
def test_training_that_turns_wrong_after_the_segment_is_diverged(
    run_cells: RunCells, mistake: str
) -> None:
    wrong = cell("broken", timed_steps=40, options={"mistake": mistake, "from_step": 10})
    (trial,) = TrialRecord.from_frame(run_cells(wrong, timed_seconds=0.1).trials)
    assert trial.status == "diverged"
    assert "after the parity segment" in trial.reason


@pytest.mark.parametrize("strategy", ["trainer", "ddp_elastic", "parameter_server"])
def test_who_must_know_the_number_of_steps_takes_as_many_as_the_cell_says(
    run_cells: RunCells, strategy: str
) -> None:
    results = run_cells(cell(strategy), timed_seconds=0.5)
    (trial,) = TrialRecord.from_frame(results.trials)
    assert trial.status == "ok", trial.log_tail
    assert set(results.steps.groupby("rank")["step"].nunique()) == {8}
    assert trial.window_control_seconds
