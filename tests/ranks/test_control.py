"""The control between steps: what it records and what it must not hide or change."""

from __future__ import annotations

import pandas as pd
import pytest

from harness.cell.cell import Cell
from harness.record.trial import TrialRecord
from harness.run.prepared import SAMPLES_PER_CONTROL
from tests.ranks.conftest import RunCells, cell


def test_steps_are_taken_by_time_with_a_control_between_them(run_cells: RunCells) -> None:
    results = run_cells(cell("ddp"), timed_seconds=0.5)
    (trial,) = TrialRecord.from_frame(results.trials)
    assert (trial.status, trial.parity_verdict) == ("ok", "exact"), trial.log_tail
    timed = results.steps[results.steps["phase"] == "timed"]
    by_rank = timed.groupby("rank")["step"].agg(list)
    assert by_rank[0] == by_rank[1]
    count = len(by_rank[0])
    assert count > 5
    seconds = timed.groupby("step")["step_seconds"].max().sum()
    assert seconds > 0.25 or count == 200  # steps may speed up after the count is agreed
    paused = timed["control_seconds"].dropna()
    every = SAMPLES_PER_CONTROL * trial.devices / trial.global_batch
    assert 1 < every < count
    assert len(timed) // every - 2 <= len(paused) <= len(timed) // every + 4
    assert (paused > 0).all()
    assert len(trial.window_step_seconds) == max(1, count // 8)
    # The first window's control covers its own pauses and the last one before it.
    pauses = results.steps.pivot(index="step", columns="rank", values="control_seconds").dropna()
    first = by_rank[0][: 8 if count >= 16 else count]
    before = pauses[pauses.index < first[0]].tail(1)
    within = pauses[pauses.index.isin(first)]
    assert len(before) == 1
    shares = (len(within) + 1) * trial.window_control_seconds[0]
    assert shares == pytest.approx(within.mean(axis=1).sum() + before.mean(axis=1).sum())
    slowest = zip(trial.window_slowest_control_seconds, trial.window_control_seconds, strict=True)
    assert all(most >= mean for most, mean in slowest)
    assert trial.later_steps_verified is not None
    assert trial.later_steps_verified >= len(trial.losses) - 8
    assert trial.later_loss_deviation is not None
    assert trial.later_loss_deviation < 1e-4


def test_memory_and_traffic_are_those_without_a_control(run_cells: RunCells) -> None:
    # Use a micro model: random heap leftovers are 5% of a nano model's 3.5 MB.
    micro = cell("ddp", workload="llama-micro")
    (plain,) = TrialRecord.from_frame(run_cells(micro).trials)
    (controlled,) = TrialRecord.from_frame(run_cells(micro, timed_seconds=0.1).trials)
    assert plain.peak_memory_bytes
    assert controlled.peak_memory_bytes
    assert controlled.peak_memory_bytes <= 1.1 * plain.peak_memory_bytes
    assert controlled.sent_bytes_per_step == pytest.approx(plain.sent_bytes_per_step, rel=0.05)
    assert controlled.foreign_load_cores is not None


@pytest.mark.thorough
@pytest.mark.alone
def test_work_in_a_thread_after_the_step_is_the_next_steps(run_cells: RunCells) -> None:
    """The rank is stopped while the control runs, so the thread does none of its work meanwhile."""
    plain = cell("hidden", workload="llama-micro")
    more = {"milliseconds": 60.0, "in_thread": True}
    hidden = cell("hidden", workload="llama-micro", options=more)
    launches = []
    for _ in range(4):  # the fastest launch counts, as others may use this machine
        launches.append(timed_steps(run_cells, plain, hidden).groupby("cell_id"))
        seconds = min_of([launch["step_seconds"].median() for launch in launches])
        control = min_of([launch["control_seconds"].min() for launch in launches])
        alike = control[hidden.id] == pytest.approx(control[plain.id], rel=0.35)
        if alike and seconds[hidden.id] > seconds[plain.id] + 0.010:
            break
    assert seconds[hidden.id] > seconds[plain.id] + 0.010
    assert alike, control


@pytest.mark.thorough
@pytest.mark.alone
def test_a_parameter_servers_threads_do_not_slow_the_control_down(run_cells: RunCells) -> None:
    """The server's threads never rest and share a rank's cores, where the control took twice as
    long."""
    cells = [cell(name, workload="llama-micro") for name in ("ddp", "parameter_server")]
    steps = timed_steps(run_cells, *cells)
    for _ in range(5):
        alone, shared = (
            steps[steps["cell_id"] == one.id].groupby("rank")["control_seconds"].min()
            for one in cells
        )
        assert shared.isna().tolist() == [False, False, True], "the server has no control"
        near = pytest.approx(alone.tolist(), rel=0.8)
        if shared.dropna().tolist() == near:
            break
        steps = pd.concat([steps, timed_steps(run_cells, *cells)])
    assert shared.dropna().tolist() == near


def min_of(launches: list[pd.Series[float]]) -> pd.Series[float]:
    return pd.concat(launches, axis=1).min(axis=1)


def timed_steps(run_cells: RunCells, *cells: Cell) -> pd.DataFrame:
    return run_cells(*cells, timed_seconds=0.7).steps.query("phase == 'timed'")


def test_cells_on_several_ranks_that_share_a_core_go_on(run_cells: RunCells) -> None:
    ranks = cell("ddp", devices=4)
    results = run_cells(ranks, timed_seconds=0.2)
    (trial,) = TrialRecord.from_frame(results.trials)
    assert trial.status == "ok", trial.log_tail
    assert trial.window_control_seconds
    # A control is due every four steps. The first comes after the three warm-up steps, as controls
    # then build their model, which must not count as other processes' load.
    assert SAMPLES_PER_CONTROL * ranks.devices / ranks.global_batch == 4
    paused = results.steps.dropna(subset="control_seconds").groupby("rank")["step"].min()
    assert paused.tolist() == [2] * 4


def test_a_rewind_finds_a_mistake_that_losses_do_not_show(run_cells: RunCells) -> None:
    """If one norm is not decayed, later losses are off by less than rounding may cause."""
    axes = {"timed_steps": 12, "parity_steps": 10}
    wrong = cell("broken", options={"mistake": "undecayed_norm", "from_step": 11}, **axes)
    results = run_cells(wrong, cell("broken", **axes), timed_seconds=0.1)
    trials = {trial.options: trial for trial in TrialRecord.from_frame(results.trials)}
    right = trials["{}"]
    assert (right.status, right.rewind_skipped_reason) == ("ok", None)
    assert right.rewinds
    assert right.rewind_loss_deviation is not None
    assert right.rewind_loss_deviation < 1e-6
    assert right.rewind_update_deviation is not None
    assert right.rewind_update_deviation < 1e-4
    (found,) = (trial for options, trial in trials.items() if options != "{}")
    assert found.status == "diverged"
    assert "when its state was rewound to step 7, its optimizer ahead: parameters" in found.reason
    assert found.later_loss_deviation is not None
    assert found.later_loss_deviation < 2e-6, "the envelope alone does not show it"
    steps = results.steps[
        (results.steps["cell_id"] == right.cell_id) & (results.steps["rank"] == 0)
    ]
    again = steps[steps["training_step"] < steps["step"]]
    assert set(again["training_step"]) >= {7, 8, 9}
    assert (again[again["training_step"] > 7]["phase"] == "timed").any()


def test_strategies_with_a_fixed_step_count_take_the_cells_steps(run_cells: RunCells) -> None:
    cells = [cell(name, parity_steps=5) for name in ("trainer", "ddp_elastic", "parameter_server")]
    results = run_cells(*cells, timed_seconds=0.5)
    for trial in TrialRecord.from_frame(results.trials):
        assert trial.status == "ok", trial.log_tail
        assert "fixed" in (trial.rewind_skipped_reason or "")
        assert trial.window_control_seconds
    assert set(results.steps.groupby(["cell_id", "rank"])["step"].nunique()) == {8}
