"""Adapters and low-bit weights train on real ranks as in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.cell.cell import Cell
from harness.parity.reference_runs import reference_of
from harness.parity.verdict import in_fp32
from harness.workloads import make_workload
from harness.workloads.counts import model_facts
from tests.ranks.conftest import RunCells, cell

EXACT = ("ok", "exact", 1e-6)


def verdict(trial: Any) -> tuple[Any, ...]:
    return (
        trial["status"],
        trial["parity_verdict"],
        trial["parity_loss_tolerance"],
    )


def holds_what_the_formula_says(trial: Any) -> None:
    for kind in ("parameter", "optimizer", "library"):
        assert all(
            held == pytest.approx(trial[f"formula_{kind}_bytes"], rel=0.01)
            for held in trial[f"{kind}_bytes"]
        ), kind


def test_frozen_parameters_are_those_that_the_reference_does_not_move(run_cells: RunCells) -> None:
    """Frozen parameters match bit for bit: any change is infinitely larger than the reference's
    update."""
    one = cell("ddp", workload="gpt2-nano+lora")
    assert verdict(run_cells(one).trials.iloc[0]) == EXACT
    norms = reference_of(one).facts["update_norms"]
    trained = model_facts(make_workload(one.workload), one.sequence_length).trainable
    assert {name for name, norm in norms.items() if norm > 0} == set(trained)


def test_quantised_weights_train_the_same_at_their_distance_to_fp32(run_cells: RunCells) -> None:
    """On a CPU, matrices are dequantised to fp32 for each product, so splitting the batch changes
    nothing. One process is the reference."""
    matrices, bits = 4 * (4 * 128 * 128 + 3 * 128 * 352), {"int8": 1, "nf4": 0.5}
    in_fp32 = model_facts(make_workload("llama-micro+lora"), 32).parameter_bytes
    cells = {one: cell("ddp", workload=f"llama-micro+{one}+lora") for one in bits}
    trials = run_cells(*cells.values()).trials.set_index("cell_id")
    for one, weights in bits.items():
        trial = trials.loc[cells[one].id]
        assert verdict(trial) == EXACT, trial["reason"] + trial["log_tail"]
        holds_what_the_formula_says(trial)
        assert trial["parameter_bytes"][0] == pytest.approx(in_fp32 - (4 - weights) * matrices)
        assert 1e-6 < trial["fp32_loss_deviation"] < 2e-2
        named = json.loads(trial["library_buffers"])
        assert named[f"scales of {one} weights"] > 0
        assert ("code book of nf4" in named) == (one == "nf4")


def test_half_weights_train_the_same_within_what_they_declare(run_cells: RunCells) -> None:
    half, full = cell("ddp", workload="llama-nano+bf16"), cell("ddp")
    trials = run_cells(half, full).trials.set_index("workload")
    trial, in_fp32 = trials.loc[half.workload], trials.loc[full.workload]
    assert trial["status"] == "ok", trial["reason"]
    assert 0 < trial["parity_loss_tolerance"] <= 5e-3
    holds_what_the_formula_says(trial)
    pairs = zip(trial["losses"], in_fp32["reference_losses"], strict=False)
    gaps = [abs(a - b) / b for a, b in pairs]
    assert trial["fp32_loss_deviation"] == pytest.approx(max(gaps))
    assert pd.isna(in_fp32["fp32_loss_deviation"])
    assert trial["parameter_bytes"][0] == 2 * trial["parameters"]
    sent = float(max(trial["sent_bytes_per_step"]))
    assert sent == pytest.approx(2 * trial["parameters"], rel=0.05)


def test_a_users_own_model_takes_suffixes(run_cells: RunCells, tmp_path: Path) -> None:
    """Suffixes also work if the model's path has a plus sign."""
    folder = tmp_path / "c++" / "model"
    make_workload("llama-nano").build(5).save_pretrained(folder)
    one = Cell(**cell("ddp", workload=f"hf:{folder}+bf16+lora").model_dump())
    assert in_fp32(one) is not None
    trial = run_cells(one).trials.iloc[0]
    assert trial["status"] == "ok", trial["reason"]
    assert trial["trained_parameters"] == 10_240
