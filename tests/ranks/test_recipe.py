"""Practical recipes are right in each library, and each mistake is detected."""

from __future__ import annotations

from typing import Any

import pytest

from harness.cell.cell import Cell
from harness.record.store import Results
from tests.ranks.conftest import RunCells, cell, representative

RECIPE: dict[str, Any] = {
    "clip_norm": 0.6,  # about a third of a gradient's norm
    "schedule": "warmup_cosine",
    "decay": "matrices",
    "labels": "padded",
    "weight_decay": 0.5,
}
LARGEST_NORM_DEVIATION = 1e-5


def trained(strategy: str, **axes: Any) -> Cell:
    return cell(strategy, **{**RECIPE, **axes})


def largest(results: Results) -> float:
    """Returns the largest deviation of a gradient norm; checks that all cells are exact."""
    trials = results.trials
    assert list(trials["status"]) == ["ok"] * len(trials), list(trials["reason"])
    assert set(trials["parity_verdict"]) == {"exact"}
    norms = trials["gradient_norms"].map(min)
    assert (norms > trials["clip_norm"]).all(), "every step must be clipped"
    return float(trials["parity_max_norm_deviation"].max())


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("workload", representative(["llama-nano", "gpt2-nano", "mixtral-nano"]))
def test_each_way_to_split_the_work_clips_to_the_same_norm(
    run_cells: RunCells, workload: str, seed: int
) -> None:
    axes: dict[str, Any] = {"workload": workload, "seed": seed, "micro_batches": 2}
    cells = [trained(name, **axes) for name in ("ddp", "fsdp1", "fsdp2")]
    if workload != "mixtral-nano":
        cells += [trained("pipeline", **axes), trained("tensor", **axes)]
    deviation = largest(run_cells(*cells))
    print(f"{workload}, seed {seed}: norms deviate by up to {deviation:.1e}")
    assert deviation <= LARGEST_NORM_DEVIATION


def test_deepspeed_shards_the_states_of_two_parameter_groups(run_cells: RunCells) -> None:
    """Matrices decay and vectors do not. DeepSpeed links only the first group with its states."""
    pytest.importorskip("deepspeed")
    cells = [
        trained("deepspeed", micro_batches=2, workload="gpt2-nano", options={"stage": stage})
        for stage in (1, 2, 3)
    ]
    assert largest(run_cells(*cells)) <= LARGEST_NORM_DEVIATION


def test_mixed_meshes_and_localised_tensors_are_counted_once(run_cells: RunCells) -> None:
    axes: dict[str, Any] = {"micro_batches": 2, "workload": "gpt2-nano", "timed_steps": 1}
    axes |= {"parity_steps": 4}
    cells = [
        trained("three_d", devices=8, options={"data_axis": axis}, **axes)
        for axis in ("fsdp2", "ddp")
    ]
    assert largest(run_cells(*cells)) <= LARGEST_NORM_DEVIATION


def test_sharding_and_sequences_that_need_gpus_are_right_on_a_stand_in(run_cells: RunCells) -> None:
    pytest.importorskip("fairscale")
    cells = [
        trained("fairscale_on_cpu", decay="all", micro_batches=2),
        trained("ring_on_cpu", micro_batches=2),
    ]
    assert largest(run_cells(*cells)) <= LARGEST_NORM_DEVIATION


def test_a_rewind_restores_the_schedule(run_cells: RunCells) -> None:
    cells = [trained(name, parity_steps=8, timed_steps=12) for name in ("ddp", "accelerate")]
    trials = run_cells(*cells, trials=3, timed_seconds=0.1).trials
    assert set(trials["parity_verdict"]) == {"exact"}, list(trials["parity_reason"])
    assert trials["rewinds"].max() >= 1


@pytest.mark.parametrize(
    "mistake",
    [
        "clip_before_reduction",
        "clip_each_micro_batch",
        "schedule_per_process",
        "decay_on_all",
        "mean_of_means",
    ],
)
def test_a_wrong_recipe_diverges(run_cells: RunCells, mistake: str) -> None:
    options = {"mistake": mistake}
    trial = run_cells(trained("recipe_traps", micro_batches=2, options=options)).trials.iloc[0]
    assert trial["status"] == "diverged", trial["log_tail"]
    assert trial["parity_max_norm_deviation"] > LARGEST_NORM_DEVIATION


def test_the_same_without_a_mistake_is_exact(run_cells: RunCells) -> None:
    assert largest(run_cells(trained("recipe_traps", micro_batches=2))) <= LARGEST_NORM_DEVIATION


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("local_norm", {}),
        ("pipeline_norm", {"mistake": "own_stage"}),
        ("pipeline_norm", {"mistake": "tied_twice"}),
        ("tensor_norm", {"mistake": "whole_twice"}),
        ("tensor_norm", {"mistake": "own_shards"}),
    ],
)
def test_a_norm_that_is_not_global_diverges(
    run_cells: RunCells, strategy: str, options: dict[str, Any]
) -> None:
    axes: dict[str, Any] = {"workload": "gpt2-nano", "micro_batches": 2, "options": options}
    trial = run_cells(trained(strategy, **axes)).trials.iloc[0]
    assert trial["status"] == "diverged", trial["log_tail"]
    assert trial["parity_max_norm_deviation"] > LARGEST_NORM_DEVIATION


def test_a_strategy_that_does_not_clip_diverges(run_cells: RunCells) -> None:
    """The cell diverges even if no gradient reaches the limit, because its norms are unknown."""
    trial = run_cells(cell("broken", clip_norm=1e6)).trials.iloc[0]
    assert trial["status"] == "diverged"


def test_a_prepared_scheduler_steps_once_per_process(run_cells: RunCells) -> None:
    """Accelerate 1.15 steps it once per process unless split_batches is set."""
    pytest.importorskip("accelerate")
    options = {"trap": "scheduler"}
    assert run_cells(trained("accelerate_traps", options=options)).trials["status"].iloc[0] == (
        "diverged"
    )


def test_deepspeed_clips_to_the_norm_of_some_parameters(run_cells: RunCells) -> None:
    """DeepSpeed 0.19 clips by the first stage's norm, or by the mean of norms with different
    experts."""
    pytest.importorskip("deepspeed")
    cells = [
        trained("first_stage_norm", micro_batches=2),
        trained("deepspeed_moe", workload="mixtral-nano"),
    ]
    trials = run_cells(*cells).trials
    assert list(trials["status"]) == ["diverged"] * 2, list(trials["log_tail"])


DROPOUT: dict[str, Any] = {"workload": "gpt2-nano", "dropout": 0.2, "micro_batches": 2}
BALANCE: dict[str, Any] = {"workload": "mixtral-nano", "balance_weight": 0.5, "micro_batches": 2}
PACKED: dict[str, Any] = {"documents": "packed", "micro_batches": 2}
"""Each axis alone, so that nothing else reveals a mistake."""


def verdicts(results: Results) -> list[str]:
    trials = results.trials.sort_values("position")
    for _, trial in trials.iterrows():
        figures = trial["parity_max_loss_deviation"], trial["parity_max_update_deviation"]
        print(trial["strategy"], trial["options"], trial["parity_verdict"], *figures)
    return list(trials["parity_verdict"])


def test_masks_documents_and_balance_are_those_of_one_process(run_cells: RunCells) -> None:
    cells = [
        cell("pipeline", recompute="full", **DROPOUT),
        cell("data_parallel", recompute="full", **DROPOUT),
        cell("tensor", documents="packed", **DROPOUT),
        cell("sample_traps", recompute="full", documents="packed", seed=1, **DROPOUT),
        cell("fsdp2", **PACKED, labels="padded", seed=1),
        cell("ddp", **BALANCE, documents="packed", seed=1),
    ]
    assert verdicts(run_cells(*cells)) == ["exact"] * len(cells)


def test_libraries_that_own_the_loop_or_the_attention_do_the_same(run_cells: RunCells) -> None:
    pytest.importorskip("deepspeed")
    pytest.importorskip("accelerate")
    long = {"sequence_length": 256}
    cells = [
        cell("trainer", recompute="full", documents="packed", **DROPOUT),
        cell("trainer", **BALANCE),
        cell("deepspeed_pipeline", recompute="full", **DROPOUT),
        cell("deepspeed", options={"stage": 3}, documents="packed", **DROPOUT),
        cell("ulysses", **DROPOUT, **long),
        cell("ulysses_zero", micro_batches=2, **long),
        cell("ring_on_cpu", **DROPOUT, **long),
    ]
    assert verdicts(run_cells(*cells)) == ["exact"] * len(cells)


def test_mistakes_in_masks_documents_and_balance_diverge(run_cells: RunCells) -> None:
    mistakes = {
        "same_masks_on_all_ranks": DROPOUT,
        "other_masks_in_recomputation": DROPOUT | {"recompute": "full"},
        "no_balance": BALANCE,
        "balance_only_reported": BALANCE,
        "balance_times_ranks": BALANCE,
        "balance_of_first_micro_batch": BALANCE,
        "attention_across_documents": PACKED,
        "one_document": PACKED,
    }
    cells = [
        cell("sample_traps", options={"mistake": mistake}, **axes)
        for mistake, axes in mistakes.items()
    ]
    assert verdicts(run_cells(*cells)) == ["diverged"] * len(cells)


def test_trainers_balancing_loss_counts_for_each_rank_and_micro_batch(run_cells: RunCells) -> None:
    """transformers 5.23 adds the balancing loss once per rank and micro-batch unless patched."""
    pytest.importorskip("accelerate")
    assert verdicts(
        run_cells(cell("trainer_traps", options={"trap": "balance_as_it_is"}, **BALANCE))
    ) == ["diverged"]


def test_rewound_steps_have_their_masks_and_documents(run_cells: RunCells) -> None:
    axes = DROPOUT | {"documents": "packed", "timed_steps": 12}
    trials = run_cells(cell("ddp", **axes), trials=3, timed_seconds=0.1).trials
    assert set(trials["parity_verdict"]) == {"exact"}, list(trials["parity_reason"])
    assert trials["rewinds"].max() >= 1
