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
def test_low_precision_hides_no_mistake(run_cells: RunCells, precision: str) -> None:
    mistakes = ["no_synchronization", "summed_gradients", "repeated_batch"]
    broken = (cell("broken", precision=precision, options={"mistake": m}) for m in mistakes)
    trials = run_cells(cell("ddp", precision=precision), *broken).trials
    assert list(trials[trials["strategy"] == "ddp"]["status"]) == ["ok"]
    found = trials[trials["strategy"] == "broken"]
    assert list(found["status"]) == ["diverged"] * len(mistakes), list(found["options"])


def test_a_strategy_of_another_installed_package_runs(run_cells: RunCells) -> None:
    trial = run_cells(cell("outside")).trials.iloc[0]
    assert (trial["status"], trial["parity_verdict"]) == ("ok", "exact")


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
