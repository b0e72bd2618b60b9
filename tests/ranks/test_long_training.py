"""Each strategy also trains a nano model for many steps, compared at random ones."""

from __future__ import annotations

import pytest

from harness.record.trial import TrialRecord
from harness.run import long_training
from tests.ranks.conftest import RunCells, cell


def trials_of(run_cells: RunCells, *strategies: str, from_step: int) -> dict[str, TrialRecord]:
    cells = [
        cell(strategy, options={"from_step": from_step} if "silent" in strategy else {})
        for strategy in strategies
    ]
    found = TrialRecord.from_frame(run_cells(*cells, long_training=True).trials)
    return {trial.strategy: trial for trial in found}


def check(right: TrialRecord, wrong: TrialRecord, steps: int) -> None:
    assert (right.status, right.parity_verdict, right.verified_steps) == ("ok", "exact", steps)
    assert len(right.long_sketched_after) == 4
    assert right.long_update_deviation is not None
    assert right.long_update_deviation < 1e-4
    assert wrong.status == "diverged"
    assert wrong.verified_steps is None
    assert f"in a training of {steps} steps of llama-nano: " in wrong.reason


def test_ranks_that_stop_exchanging_late_are_found(
    run_cells: RunCells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cell's own trial ends before. A shorter training here takes less time."""
    monkeypatch.setattr(long_training, "LONG_STEPS", 40)
    trials = trials_of(run_cells, "ddp", "silent_ddp", from_step=25)
    check(trials["ddp"], trials["silent_ddp"], 40)


@pytest.mark.thorough
def test_real_libraries_that_stop_exchanging_at_their_60th_step_are_found(
    run_cells: RunCells,
) -> None:
    trials = trials_of(run_cells, "ddp", "fsdp2", "silent_ddp", "silent_fsdp2", from_step=60)
    for name in ("ddp", "fsdp2"):
        check(trials[name], trials[f"silent_{name}"], 200)
