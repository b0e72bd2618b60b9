"""Long trainings: which cells have one, what is compared, and what reports say of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.analysis.summary import summarised
from harness.cell.cell import Cell
from harness.parity.comparison import with_sketch
from harness.parity.verdict import ParityVerdict
from harness.record.trial import TrialRecord
from harness.run.long_training import long_cell, steps_to_sketch
from tests.unit.html_page import page_of
from tests.unit.made_results import diverged_rows, stored, trial_rows

EXACT = ParityVerdict("exact", "", 1e-7, 1e-5, "weight", 1e-6, 1e-4)


def test_the_steps_to_compare_differ_between_runs() -> None:
    drawn = [steps_to_sketch(f"{seed}") for seed in range(50)]
    assert len(set(drawn)) == 50
    for number, parts in enumerate(zip(*drawn, strict=True)):
        assert len(set(parts)) > 15
        assert min(parts) > 20 + 45 * number
        assert max(parts) <= 20 + 45 * (number + 1)


@pytest.mark.parametrize(
    ("axes", "trains"),
    [
        ({"strategy": "ddp", "precision": "bf16"}, ("llama-nano", "fp32")),
        ({"strategy": "amp", "options": {"opt_level": "O2"}, "precision": "bf16"}, ("", "bf16")),
        ({"strategy": "sync_batch_norm", "workload": "resnet-micro"}, ("resnet-micro", "fp32")),
        ({"strategy": "pipeline", "micro_batches": 4}, ("llama-nano", "fp32")),
        ({"strategy": "ddp", "devices": 1}, None),
        ({"strategy": "ddp", "nodes": 2}, None),
        ({"strategy": "ddp", "compile": "block"}, None),
    ],
)
def test_a_long_training_is_in_fp32_and_of_the_smallest_model_that_suits(
    axes: dict[str, object], trains: tuple[str, str] | None
) -> None:
    images = {"data": "images"} if "resnet" in str(axes) else {}
    nano = long_cell(Cell(**{"devices": 2, **axes, **images}))
    if trains is None:
        assert nano is None
        return
    assert nano is not None
    assert (nano.workload, nano.precision) == (trains[0] or "llama-nano", trains[1])
    assert (nano.total_steps, nano.parity_steps) == (200, 20)


def test_a_sketch_off_by_more_than_ten_times_the_updates_limit_diverges() -> None:
    reference, norms = {"weight": 3.0, "bias": 1.0}, {"weight": 2.0, "bias": 1.0}
    near, far = {"weight": 3.0 + 1e-4, "bias": 1.0}, {"weight": 3.0, "bias": 1.0 + 2e-3}
    right = with_sketch(EXACT, [(reference, near), (reference, reference)], norms, 77)
    assert (right.verdict, right.max_update_deviation) == ("exact", pytest.approx(5e-5))
    wrong = with_sketch(EXACT, [(reference, near), (reference, far)], norms, 77)
    assert wrong.verdict == "diverged"
    assert (
        wrong.reason == "after 77 steps, bias is off by 2.0e-03 of its first update (allowed 1e-03)"
    )
    assert with_sketch(EXACT, [], norms, 77).verdict == "diverged", "nothing was compared"
    broken = {"weight": float("nan"), "bias": 1.0}
    assert with_sketch(EXACT, [(reference, broken)], norms, 77).verdict == "diverged"


def test_the_number_of_verified_steps_stands_next_to_the_verdict(tmp_path: Path) -> None:
    fast, slow, wrong = (Cell(strategy=name, devices=2) for name in ("fast", "slow", "wrong"))
    rows = [
        *trial_rows(fast, [9.0, 9.1], verified_steps=200),
        *trial_rows(slow, [8.0, 8.1]),
        *diverged_rows(wrong),
    ]
    results = stored(tmp_path, rows)
    cells = {
        cell.cell.strategy: cell.parity_and_steps
        for cell in summarised(TrialRecord.from_frame(results.trials))
    }
    assert cells == {"fast": "exact, 200 steps", "slow": "exact", "wrong": "diverged"}
    assert "exact, 200 steps" in page_of(results, tmp_path).text
