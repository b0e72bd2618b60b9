"""Mistakes that bf16 nearly hides, and late ones shared by all ranks, are reported diverged."""

from __future__ import annotations

from harness.record.store import Results
from tests.ranks.conftest import RunCells
from tests.ranks.test_subtle import IN_FP32, subtle

IN_HALF = ("half_moment", "undecayed_embedding", "half_undecayed")
"""Mistakes that are also found in the exact fp32 twin required of a ranked bf16 cell."""


def verdicts(results: Results) -> list[str]:
    return list(results.trials["parity_verdict"])


def test_bf16_hides_neither_missing_decay_nor_a_coarse_moment(run_cells: RunCells) -> None:
    cells = [subtle(mistake, precision="bf16") for mistake in ("none", *IN_HALF)]
    assert set(IN_HALF) <= set(IN_FP32)
    found = run_cells(*cells).trials.set_index("cell_id").loc[[cell.id for cell in cells]]
    assert list(found["parity_verdict"]) == ["within tolerance"] + ["diverged"] * len(IN_HALF)


def test_an_optimizers_step_number_cannot_hide_a_late_mistake(run_cells: RunCells) -> None:
    """A rewind restores the step number with the optimizer, and losses stay within the envelope."""
    right, wrong = (
        subtle(mistake, options={"from_optimizer_step": 30}, timed_steps=32)
        for mistake in ("none", "half_undecayed")
    )
    found = run_cells(right, wrong, timed_seconds=0.05).trials.set_index("cell_id")
    assert found.loc[right.id, "parity_verdict"] == "exact"
    assert found.loc[wrong.id, "parity_verdict"] == "diverged"
    assert found.loc[wrong.id, "rewind_update_deviation"] > 1e-4
