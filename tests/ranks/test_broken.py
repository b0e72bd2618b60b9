"""A strategy with a training mistake is reported diverged; without the mistake it is exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.launch.launcher import Launcher
from tests.ranks.conftest import RunCells, cell
from tests.unit.test_cli import here

MISTAKES = """
no_synchronization scaled_loss summed_gradients clipping repeated_batch lost_micro_batch
other_seed frozen_tensor no_weight_decay
""".split()  # noqa: SIM905


def test_each_mistake_is_reported_diverged(run_cells: RunCells) -> None:
    """Without a mistake the same strategy is exact, and so is that of another package."""
    wrong = [cell("broken", options={"mistake": mistake}) for mistake in MISTAKES]
    right = [cell("broken"), cell("outside")]
    trials = run_cells(*wrong, *right).trials.set_index("cell_id")
    for one in wrong:
        row = trials.loc[one.id]
        assert (row["status"], row["parity_verdict"]) == ("diverged", "diverged"), one.label
        assert row["reason"]
    for one in right:
        row = trials.loc[one.id]
        assert (row["status"], row["parity_verdict"]) == ("ok", "exact"), one.label
        assert row["parity_max_loss_deviation"] <= 1e-6


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_hides_no_mistake(run_cells: RunCells, precision: str) -> None:
    mistakes = ["no_synchronization", "summed_gradients", "repeated_batch"]
    broken = (cell("broken", precision=precision, options={"mistake": m}) for m in mistakes)
    trials = run_cells(cell("ddp", precision=precision), *broken).trials
    assert list(trials[trials["strategy"] == "ddp"]["status"]) == ["ok"]
    found = trials[trials["strategy"] == "broken"]
    assert list(found["status"]) == ["diverged"] * len(mistakes), list(found["options"])


def test_a_divergence_is_exit_code_1_and_an_expected_one_is_not(
    launcher: Launcher, tmp_path: Path
) -> None:
    (tmp_path / "bad.yaml").write_text(
        "trials: 1\ntimed_seconds: 0\n"
        "defaults: {workload: llama-nano, devices: 2, timed_steps: 3}\ncells:"
        " [{strategy: broken, options: {mistake: clipping}}]"
    )
    done = here("run", "--matrix", "bad.yaml", "--no-report", "--json", folder=tmp_path)
    assert done.returncode == 1
    assert json.loads(done.stdout)["cells"][0]["status"] == "diverged"
    expected = here(
        "run", "--matrix", "bad.yaml", "--no-report", "--set", "expect=diverged", folder=tmp_path
    )
    assert expected.returncode == 0
    assert "as expected" in expected.stdout
