"""Adapters and low-bit weights train on real ranks as in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.cell.cell import Cell
from harness.parity.reference_runs import reference_of
from harness.parity.verdict import in_fp32
from harness.workloads import make_workload
from harness.workloads.counts import model_facts
from harness.workloads.workload_variants import ADAPTERS
from tests.ranks.conftest import RunCells, cell, representative

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


def sent(trial: Any) -> float:
    return float(max(trial["sent_bytes_per_step"]))


@pytest.mark.parametrize("adapter", representative(ADAPTERS))
def test_an_adapter_trains_the_same_and_saves_what_is_not_trained(
    run_cells: RunCells, adapter: str
) -> None:
    """Optimizer state, gradient buckets and sent bytes shrink with the trained parameters.

    LoRA also runs on one rank.
    """
    name = f"llama-nano+{adapter}"
    alone = [cell("single", 1, name)] if adapter == "lora" else []
    trials = run_cells(*alone, cell("ddp", 2, name)).trials.set_index("strategy")
    trained = trials.loc["ddp", "trained_parameters"]
    for _, trial in trials.iterrows():
        assert verdict(trial) == EXACT, trial["reason"] + trial["log_tail"]
        holds_what_the_formula_says(trial)
        assert trial["optimizer_bytes"][0] == pytest.approx(8 * trained, rel=0.01)
    assert sent(trials.loc["ddp"]) == pytest.approx(4 * trained, rel=0.1, abs=1500), (
        "an all-reduce of two ranks sends the gradients once"
    )
    assert (
        json.loads(trials.loc["ddp", "library_buffers"])["gradient buckets of DDP's reducer"]
        == 4 * trained
    )


def test_dora_is_exact_in_shards(run_cells: RunCells) -> None:
    trial = run_cells(cell("fsdp2", 2, "llama-nano+dora")).trials.iloc[0]
    assert verdict(trial) == EXACT, trial["reason"] + trial["log_tail"]


def test_lora_saves_against_the_whole_model(run_cells: RunCells) -> None:
    trials = run_cells(
        cell("ddp", workload="llama-micro"), cell("ddp", workload="llama-micro+lora")
    ).trials.set_index("workload")
    whole, lora = trials.loc["llama-micro"], trials.loc["llama-micro+lora"]
    assert lora["trained_parameters"] == 78_848
    assert whole["trained_parameters"] == 869_504
    assert sent(lora) < sent(whole) / 10
    assert lora["optimizer_bytes"][0] < whole["optimizer_bytes"][0] / 10
    assert lora["peak_memory_bytes"] < whole["peak_memory_bytes"]


def test_frozen_parameters_are_those_that_the_reference_does_not_move(run_cells: RunCells) -> None:
    """Frozen parameters match bit for bit: any change is infinitely larger than the reference's
    update."""
    one = cell("ddp", workload="gpt2-nano+lora")
    assert verdict(run_cells(one).trials.iloc[0]) == EXACT
    norms = reference_of(one).facts["update_norms"]
    trained = model_facts(make_workload(one.workload), one.sequence_length).trainable
    assert {name for name, norm in norms.items() if norm > 0} == set(trained)


@pytest.mark.parametrize(
    ("mistake", "workload"),
    [
        ("thawed", "llama-nano+lora"),
        ("unseeded", "llama-nano+lora"),
        ("unseeded", "llama-nano+prefix"),
        ("first_positions", "llama-nano+prompt"),
    ],
)
def test_mistakes_about_the_adapter_are_seen(
    run_cells: RunCells, mistake: str, workload: str
) -> None:
    right, wrong = (
        cell("variant_astray", workload=workload, options={"mistake": m}) for m in ("none", mistake)
    )
    trials = run_cells(right, wrong).trials.set_index("options")
    assert verdict(trials.loc[json.dumps(right.options)]) == EXACT
    assert trials.loc[json.dumps(wrong.options), "status"] == "diverged"


@pytest.mark.parametrize("workload", ["llama-nano+bf16", "llama-nano+nf4+lora"])
def test_gradients_that_are_not_synchronised_are_seen(run_cells: RunCells, workload: str) -> None:
    axes: dict[str, Any] = {"workload": workload, "timed_steps": 10, "parity_steps": 13}
    trials = run_cells(
        *(cell("broken", options={"mistake": m}, **axes) for m in ("none", "no_synchronization"))
    ).trials
    assert sorted(trials["status"]) == ["diverged", "ok"], list(trials["reason"])


@pytest.mark.parametrize(
    ("workload", "axes", "weights"),
    representative(
        [
            ("llama-micro+int8+lora", {}, 1),
            ("llama-micro+nf4+lora", {}, 0.5),
            ("llama-micro+nf4+dora", {}, 0.5),
            ("gpt2-micro+nf4+prefix", {}, 0.5),
            ("llama-micro+int8+ia3", {}, 1),
        ]
    ),
)
def test_quantised_weights_train_the_same_at_their_distance_to_fp32(
    run_cells: RunCells, workload: str, axes: dict[str, Any], weights: float
) -> None:
    """On a CPU, matrices are dequantised to fp32 for each product, so splitting the batch changes
    nothing. One process is the reference."""
    trials = run_cells(cell("ddp", workload=workload, **axes)).trials
    matrices = 4 * (
        4 * 128 * 128 + (3 * 128 * 352 if workload.startswith("llama") else 2 * 128 * 512)
    )
    in_fp32 = model_facts(
        make_workload(workload.replace("+int8", "").replace("+nf4", "")), 32
    ).parameter_bytes
    for _, trial in trials.iterrows():
        assert verdict(trial) == EXACT, trial["reason"] + trial["log_tail"]
        holds_what_the_formula_says(trial)
        assert trial["parameter_bytes"][0] == pytest.approx(in_fp32 - (4 - weights) * matrices)
        assert 1e-6 < trial["fp32_loss_deviation"] < 2e-2
        named = json.loads(trial["library_buffers"])
        bits = "int8" if weights == 1 else "nf4"
        assert named[f"scales of {bits} weights"] > 0
        assert ("code book of nf4" in named) == (bits == "nf4")


@pytest.mark.parametrize(
    ("workload", "axes"),
    representative(
        [
            ("llama-nano+bf16", {}),
            ("bert-micro+bf16", {}),
            ("llama-nano+fp16", {"optimizer": "sgd", "learning_rate": 0.05}),
            ("llama-nano+fp16+lora", {}),
        ]
    ),
)
def test_half_weights_train_the_same_within_what_they_declare(
    run_cells: RunCells, workload: str, axes: dict[str, Any]
) -> None:
    # fp16 is slow on most CPUs.
    steps: dict[str, Any] = {"warmup_steps": 1, "timed_steps": 3, "parity_steps": 3}
    axes = {**axes, **steps, "global_batch": 4}
    half, full = (
        cell("ddp", workload=workload, **axes),
        cell("ddp", workload=workload.replace("+bf16", "").replace("+fp16", ""), **axes),
    )
    trials = run_cells(half, full).trials.set_index("workload")
    trial = trials.loc[half.workload]
    assert trial["status"] == "ok", trial["reason"]
    assert 0 < trial["parity_loss_tolerance"] <= (5e-3 if "bf16" in workload else 1e-3)
    holds_what_the_formula_says(trial)
    gaps = [
        abs(a - b) / b
        for a, b in zip(
            trial["losses"], trials.loc[full.workload, "reference_losses"], strict=False
        )
    ]
    assert trial["fp32_loss_deviation"] == pytest.approx(max(gaps))
    assert (
        trials.loc[full.workload, "fp32_loss_deviation"]
        != trials.loc[full.workload, "fp32_loss_deviation"]
    ), "null: it is fp32"
    if "lora" not in workload:
        assert trial["parameter_bytes"][0] == 2 * trial["parameters"]
        assert sent(trial) == pytest.approx(2 * trial["parameters"], rel=0.05)


def test_pure_fp16_with_adamw_is_not_even_repeatable(run_cells: RunCells) -> None:
    """Squared gradients below 6e-8 are zero in fp16. The step is then divided by epsilon alone, so
    rounding decides its direction."""
    axes: dict[str, Any] = {
        "timed_steps": 10,
        "parity_steps": 13,
        "global_batch": 2,
        "expect": "diverged",
    }
    trial = run_cells(cell("ddp", workload="llama-micro+fp16", **axes)).trials.iloc[0]
    assert (trial["status"], trial["expected"]) == ("diverged", True)
    assert trial["fp32_loss_deviation"] > 0.05


@pytest.mark.parametrize("strategy", representative(["fsdp1", "fsdp2", "zero_redundancy"]))
def test_sharding_strategies_train_frozen_and_trained_parameters_together(
    run_cells: RunCells, strategy: str
) -> None:
    trial = run_cells(cell(strategy, workload="llama-nano+lora")).trials.iloc[0]
    assert verdict(trial) == EXACT, trial["reason"] + trial["log_tail"]
    share = 1 if strategy == "zero_redundancy" else 2
    assert trial["parameter_bytes"][0] == pytest.approx(4 * trial["parameters"] / share, rel=0.01)
    assert sum(trial["optimizer_bytes"]) == pytest.approx(8 * trial["trained_parameters"], rel=0.01)
    if strategy == "zero_redundancy":
        assert sent(trial) < 8 * trial["trained_parameters"] + 5000, (
            "frozen parameters are not broadcast"
        )


def test_a_users_own_model_takes_suffixes(run_cells: RunCells, tmp_path: Path) -> None:
    """Suffixes also work if the model's path has a plus sign."""
    folder = tmp_path / "c++" / "model"
    make_workload("llama-nano").build(5).save_pretrained(folder)
    one = Cell(**cell("ddp", workload=f"hf:{folder}+bf16+lora").model_dump())
    assert in_fp32(one) is not None
    trial = run_cells(one).trials.iloc[0]
    assert trial["status"] == "ok", trial["reason"]
    assert trial["trained_parameters"] == 10_240
