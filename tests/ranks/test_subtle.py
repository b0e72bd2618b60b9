"""Mistakes that hardly change the losses are reported diverged, or the cell is not ranked."""

from __future__ import annotations

from harness.cell.cell import Cell
from tests.ranks.conftest import RunCells, cell

IN_FP32 = """
half_gradients half_moment undecayed_embedding half_undecayed one_element other_epsilon
""".split()  # noqa: SIM905


def subtle(mistake: str, **axes: object) -> Cell:
    options = {"mistake": mistake, **axes.pop("options", {})}  # type: ignore[dict-item]
    return cell("subtle", options=options, **axes)


def test_small_mistakes_are_diverged(run_cells: RunCells) -> None:
    right = [
        subtle("none"),
        subtle("none", precision="bf16"),
        subtle("none", workload="resnet-micro"),
    ]
    wrong = [
        *(subtle(mistake) for mistake in IN_FP32),
        subtle("last_part", micro_batches=2),
        subtle("no_decay", precision="bf16"),
        subtle("frozen_statistics", workload="resnet-micro"),
    ]
    capped = subtle("no_exchange", options={"wide": True})
    trials = run_cells(*right, *wrong, capped).trials
    found = {(t["cell_id"]): (t["status"], t["parity_verdict"]) for _, t in trials.iterrows()}
    assert {c.name: found[c.id] for c in wrong} == {c.name: ("diverged", "diverged") for c in wrong}
    exact, half = ("ok", "exact"), ("ok", "within tolerance")
    assert [found[c.id] for c in right] == [exact, half, exact]
    assert found[capped.id] == ("ok", "unknown")


def test_ranks_that_stop_exchanging_late_are_diverged(run_cells: RunCells) -> None:
    """A rewind restores the registered step counter, and losses stay within the envelope."""
    right, wrong = (
        subtle(mistake, options={"from_step": 30}, timed_steps=32)
        for mistake in ("none", "no_exchange")
    )
    trials = run_cells(right, wrong, timed_seconds=0.05).trials.set_index("cell_id")
    assert trials.loc[right.id, "parity_verdict"] == "exact"
    assert trials.loc[right.id, "parity_max_replica_deviation"] <= 1e-6
    assert trials.loc[wrong.id, "parity_verdict"] == "diverged"
    assert trials.loc[wrong.id, "parity_max_replica_deviation"] > 1e-2
