"""Strategies that run well and train wrongly are reported; without the mistake they are exact.

Each subject is one run, and each of its rows must end as it says. tests/plugin has the strategies.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import psutil
import pytest

from harness.strategies._deepspeed import compiled_parts, fp16_on_cpu, lockable_bytes
from harness.strategies._horovod import built
from tests.ranks.conftest import Row, RunCells, check_rows, row

exact, near, unknown, diverges, fails = (
    partial(row, outcome)
    for outcome in ("exact", "within tolerance", "unknown", "diverged", "failed")
)
LATE = "after the parity segment"
SGD: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.05, "weight_decay": 0.0}
"""SGD, whose update shows a gradient's scale; AdamW's hides it."""
LONG: dict[str, Any] = {"timed_steps": 10, "parity_steps": 13}
RECIPE: dict[str, Any] = {
    "clip_norm": 0.6,  # about a third of a gradient's norm
    "schedule": "warmup_cosine",
    "decay": "matrices",
    "labels": "padded",
    "weight_decay": 0.5,
    "micro_batches": 2,
}
# Each axis alone, so that nothing else reveals a mistake.
DROPOUT: dict[str, Any] = {"workload": "gpt2-nano", "dropout": 0.2, "micro_batches": 2}
BALANCE: dict[str, Any] = {"workload": "mixtral-nano", "balance_weight": 0.5, "micro_batches": 2}
PACKED: dict[str, Any] = {"documents": "packed", "micro_batches": 2}


def broken(mistake: str, **axes: Any) -> Row:
    return diverges("broken", {"mistake": mistake}, **axes)


def subtle(outcome: str, mistake: str, options: dict[str, Any] | None = None, **axes: Any) -> Row:
    return row(outcome, "subtle", {"mistake": mistake, **(options or {})}, **axes)


TRAPS: dict[str, list[Row]] = {
    "data parallelism by hand": [
        exact("broken"),
        exact("outside"),
        *(
            broken(mistake)
            for mistake in (
                *("no_synchronization", "scaled_loss", "summed_gradients", "clipping"),
                *("repeated_batch", "lost_micro_batch", "other_seed", "frozen_tensor"),
                "no_weight_decay",
            )
        ),
        # Without clipping, norms are unknown, even if no gradient reaches the limit.
        broken("none", clip_norm=1e6),
        # A strategy that builds its own model would ignore this axis.
        fails("broken", None, "did not build its model with job.model()", recompute="full"),
    ],
    "low precision": [
        near("ddp", precision="bf16"),
        near("ddp", precision="fp16"),
        *(
            broken(mistake, precision=precision)
            for precision in ("bf16", "fp16")
            for mistake in ("no_synchronization", "summed_gradients", "repeated_batch")
        ),
        near("broken", workload="llama-nano+bf16", **LONG),
        broken("no_synchronization", workload="llama-nano+bf16", **LONG),
        exact("broken", workload="llama-nano+nf4+lora", **LONG),
        broken("no_synchronization", workload="llama-nano+nf4+lora", **LONG),
    ],
    "mistakes that losses hardly show": [
        subtle("exact", "none"),
        subtle("within tolerance", "none", precision="bf16"),
        subtle("exact", "none", workload="resnet-micro"),
        *(
            subtle("diverged", mistake)
            for mistake in ("half_gradients", "one_element", "other_epsilon", "rare_rows")
        ),
        *(
            subtle("diverged", mistake, **axes)
            for mistake in ("half_moment", "undecayed_embedding", "half_undecayed")
            # Without bf16 instructions, a missing decay of 0.01 is 6.9 of 7 standard deviations.
            for axes in ({}, {"precision": "bf16", "weight_decay": 0.02})
        ),
        subtle("diverged", "last_part", micro_batches=2),
        subtle("diverged", "no_decay", precision="bf16"),
        subtle("diverged", "frozen_statistics", workload="resnet-micro"),
        subtle("unknown", "no_exchange", {"wide": True}),
    ],
    "adapters": [
        exact("variant_astray", workload="llama-nano+lora"),
        *(
            diverges("variant_astray", {"mistake": mistake}, workload=f"llama-nano+{adapter}")
            for mistake, adapter in (
                ("thawed", "lora"),
                ("unseeded", "lora"),
                ("unseeded", "prefix"),
                ("first_positions", "prompt"),
            )
        ),
    ],
    "pipelines": [diverges("untied_pipeline", {"schedule": "gpipe"}, **DROPOUT | {"dropout": 0.0})],
    "checkpoints": [
        row(outcome, "checkpoint_traps", {"mistake": mistake}, checkpoint="sharded")
        for mistake, outcome in {
            "none": "exact",
            "nothing_loaded": "diverged",
            "no_optimizer_state": "diverged",
            "no_step_counts": "diverged",
            "one_shard_not_loaded": "diverged",
            "data_position_ignored": "failed",
            "library_counter_lost": "failed",
        }.items()
    ],
    "recipes": [
        exact("recipe_traps", **RECIPE),
        *(
            diverges("recipe_traps", {"mistake": mistake}, **RECIPE)
            for mistake in (
                *("clip_before_reduction", "clip_each_micro_batch", "schedule_per_process"),
                *("decay_on_all", "mean_of_means", "other_norm_on_rank_1"),
            )
        ),
        # Most scripts in fp16 unscale gradients, then clip them.
        near("recipe_traps", precision="fp16", **RECIPE),
        near("ddp", precision="fp16", **RECIPE),
        near("amp", {"opt_level": "O1"}, precision="fp16", **RECIPE),
        exact("amp", {"opt_level": "O2"}, precision="fp16", **RECIPE),
        diverges("recipe_traps", {"mistake": "clip_before_unscaling"}, precision="fp16", **RECIPE),
        *(
            diverges(strategy, options, workload="gpt2-nano", **RECIPE)
            for strategy, options in (
                ("local_norm", {}),
                ("pipeline_norm", {"mistake": "own_stage"}),
                ("pipeline_norm", {"mistake": "tied_twice"}),
                ("tensor_norm", {"mistake": "whole_twice"}),
                ("tensor_norm", {"mistake": "own_shards"}),
            )
        ),
    ],
    "masks, documents and balance": [
        exact("sample_traps", None, recompute="full", documents="packed", seed=1, **DROPOUT),
        *(
            diverges("sample_traps", {"mistake": mistake}, **axes)
            for mistake, axes in {
                "same_masks_on_all_ranks": DROPOUT,
                "other_masks_in_recomputation": DROPOUT | {"recompute": "full"},
                "no_balance": BALANCE,
                "balance_only_reported": BALANCE,
                "balance_times_ranks": BALANCE,
                "balance_of_first_micro_batch": BALANCE,
                "attention_across_documents": PACKED,
                "one_document": PACKED,
            }.items()
        ),
    ],
    "parameter server": [
        diverges("parameter_server_traps", options, workload="llama-micro", **LONG)
        for options in (
            {"mode": mode, "trap": trap}
            for mode in ("synchronous", "asynchronous")
            for trap in ("never_fetches", "deaf_to_one")
        )
    ],
    # Horovod diverges without the strategy's broadcast; with it, the same start stays exact. One
    # step of SGD needs no momentum; without momentum, later steps differ from the reference.
    "horovod": [
        make("horovod_traps", {**options, "trap": trap}, reason, **axes)
        for trap_of, options, axes, after in (
            ("state_before_wrapping", {}, {}, exact),
            ("state_after_wrapping", {}, {"optimizer": "sgd"}, exact),
            ("no_broadcast", {"apart": True}, {}, exact),
            (
                "state_after_wrapping",
                {"apart": True, "plain_sgd": True},
                {"optimizer": "sgd", "parity_steps": 1, "warmup_steps": 1},
                diverges,
            ),
        )
        for make, trap, reason in (
            (diverges, trap_of, ""),
            (after, "none", LATE if after is diverges else ""),
        )
    ],
    # Clearing gradients to None through the optimizer detaches them from the reduced buckets.
    # Clearing only a shard leaves the other gradients in place. Setting all to zero is correct.
    "fairscale": [
        exact("fairscale_traps", {"through": "model"}),
        exact("fairscale_traps", {"through": "optimizer_to_zero"}),
        diverges("fairscale_traps", {"through": "optimizer"}),
        diverges("fairscale_traps", {"through": "shard"}),
        diverges("fairscale_traps", {"through": "shard_to_zero"}),
        diverges("fairscale_traps", {"through": "optimizer", "broadcast_fp16": True}),
    ],
    # DeepSpeed clips unless told not to, takes a step when it is created, unscales a loss that it
    # never scaled without ZeRO, and reads fp32 parameters on disk as bf16 without fp16. Its
    # pipeline clips by the first stage's norm.
    "deepspeed": [
        exact("deepspeed_traps", workload="llama-micro"),
        diverges("deepspeed_traps", {"without": "clipping_off"}, workload="llama-micro"),
        diverges(
            *("deepspeed_traps", {"without": "undone_step"}, "off by"),
            precision="bf16",
            workload="llama-micro",
        ),
        *[diverges("deepspeed_traps", {"without": "scaled_loss"}, precision="fp16")]
        * fp16_on_cpu(),
        diverges("untied_deepspeed_pipeline", workload="gpt2-nano", micro_batches=4),
        diverges("first_stage_norm", **RECIPE),
    ],
    "offload to disk": [
        fails(
            "deepspeed_traps",
            {"stage": 3, "offload_parameters": "nvme", "without": "kept_dtype"},
            "BFloat16",
            workload="llama-512x2",
            devices=1,
        )
    ],
    "sequence": [
        # Stages 0 to 2 divide by the data-parallel ranks only, which would double updates here.
        *(diverges("unscaled_ulysses", {"stage": stage}, **SGD) for stage in (0, 1, 2)),
        diverges("ulysses_traps", {"without": "positions"}),
        diverges("ulysses_traps", {"without": "averaged_gradients"}),
    ],
    # Without torchrun's variables or `cpu=True`, each rank trains alone. On CPUs, Accelerate takes
    # FSDP for DDP. DeepSpeed clips at 1.0 and counts only one process. An optimizer without its
    # wrapper steps after every micro-batch. A prepared scheduler steps once per process.
    "accelerate": [
        *(
            make("accelerate_traps", {"trap": trap, "verified": verified}, reason)
            for trap in ("no_variables", "no_cpu")
            for make, verified, reason in (
                (fails, True, "Accelerate sees only 1 of 2 processes"),
                (diverges, False, ""),
            )
        ),
        fails(
            "accelerate_traps",
            {"engine": "fsdp2", "trap": "fsdp_on_cpu"},
            "would train with DistributedType.MULTI_CPU",
        ),
        *(
            make("accelerate_traps", {"trap": trap, **options}, reason, micro_batches=2)
            for make, trap, options, reason in (
                (exact, "none", {"engine": "zero2"}, ""),
                (diverges, "clipping", {"engine": "zero2"}, "loss is off"),
                (fails, "batch_sizes", {"engine": "zero2", "verified": False}, "batch"),
                (fails, "unnamed_backend", {"engine": "zero2"}, "sees only 1 of 2 processes"),
                (diverges, "inner_optimizer", {"engine": "ddp"}, "loss is off"),
            )
        ),
        diverges("accelerate_traps", {"trap": "scheduler"}, **RECIPE | {"micro_batches": 1}),
    ],
    "accelerate takes all cores": [
        fails("accelerate_traps", {"trap": "threads"}, "threads per rank instead of 1", devices=1)
    ],
    # Trainer shuffles, clips and decays the learning rate unless told otherwise. Its own optimizer
    # exempts some parameters from weight decay. For a GPT-2 it also counts the first unshifted
    # label, which nothing predicts. It adds the balancing loss once per rank and micro-batch.
    "trainer": [
        *(
            make("trainer_traps", {"trap": trap}, reason)
            for make, trap, reason in (
                (exact, "none", ""),
                (diverges, "clipping", "loss is off"),
                (diverges, "falling_rate", "loss is off"),
                (fails, "shuffling", "another data order"),
                (fails, "unused_parameters", "DDP's find_unused_parameters is True"),
                (fails, "no_cpu", "Accelerate sees only 1"),
                (diverges, "own_optimizer", "off by"),
                (exact, "own_optimizer_without_exemption", ""),
                (diverges, "shifted_twice", "loss is off"),
                (exact, "all_labels", ""),
                (fails, "raises", "rank 1: ValueError: the planted mistake"),
                (fails, "ends", "RuntimeError: the training loop ended"),
            )
        ),
        exact("trainer_traps", {"trap": "none", "engine": "zero2"}),
        diverges("trainer_traps", {"trap": "deepspeed_clipping", "engine": "zero2"}, "loss is off"),
        fails("trainer_traps", {"trap": "no_cpu", "engine": "zero2"}, "Accelerate sees only 1"),
        fails("trainer_traps", {"trap": "fsdp_on_cpu", "engine": "fsdp2"}, "MULTI_CPU"),
        diverges("trainer_traps", {"trap": "all_labels"}, workload="gpt2-nano"),
        exact("trainer_traps", {"trap": "first_label_masked"}, workload="gpt2-nano"),
        diverges("trainer_traps", {"trap": "count_is_ignored"}, workload="bert-micro"),
        diverges("trainer_traps", {"trap": "balance_as_it_is"}, **BALANCE),
    ],
}
LACKING = {
    "horovod": "" if built(b"GlooController") else "make setup builds Horovod",
    "offload to disk": ""
    if "async_io" in compiled_parts() and lockable_bytes() >= 2**26
    else "needs DeepSpeed with async_io (libaio-dev) and 64 MiB of lockable memory (ulimit -l)",
    "accelerate takes all cores": ""
    if (psutil.cpu_count(logical=False) or 1) > 1 and "OMP_NUM_THREADS" not in os.environ
    else "needs two cores, and OMP_NUM_THREADS unset",
}


@pytest.mark.parametrize("subject", TRAPS)
def test_each_mistake_is_reported(run_cells: RunCells, subject: str) -> None:
    if LACKING.get(subject):
        pytest.skip(LACKING[subject])
    check_rows(run_cells, TRAPS[subject])


def local(make: Any, right: str, mistake: str, from_step: int = 0, **axes: Any) -> Row:
    options = {"right": right, "mistake": mistake, "from_step": from_step}
    made: Row = make("local_traps", options, **axes)
    return made


BY_DESIGN = {
    "post_local_sgd": (["longer_period", "later_start"], ["no_average"]),
    "collectives": (["longer_period"], ["no_sum", "one_tensor_apart"]),
    "diloco": (
        ["longer_period", "no_momentum", "other_rate", "plain_momentum"],
        ["no_outer_step"],
    ),
    "powersgd": (
        ["uncompressed", "no_feedback", "lower_rank", "cold_start"],
        ["no_exchange", "feedback_lost"],
    ),
}
"""Mistakes of strategies that differ from one process by design: from the beginning, and after some
exchanges."""


@pytest.mark.parametrize("right", BY_DESIGN)
def test_strategies_that_differ_by_design_follow_their_algorithm(
    run_cells: RunCells, right: str
) -> None:
    if right == "diloco" and not find_spec("torchft"):
        pytest.skip("torchft is not installed")
    recipe = {"clip_norm": 0.6, "schedule": "warmup_cosine", "labels": "padded", "micro_batches": 2}
    from_begin, late = BY_DESIGN[right]
    rows = [
        local(exact, right, "none"),
        local(exact, right, "none", **recipe),
        local(exact, right, "none", workload="gpt2-nano", seed=1),
        *(local(diverges, right, mistake) for mistake in from_begin),
        *(local(diverges, right, mistake, from_step=1) for mistake in late),
    ]
    check_rows(run_cells, rows)


def late_rows() -> list[Row]:
    return [
        *(
            diverges("broken", {"mistake": mistake, "from_step": 10}, LATE, timed_steps=40)
            for mistake in (
                *("skipped_steps", "no_synchronization", "frozen_update", "repeated_batch"),
                *("lost_micro_batch", "lower_precision"),
            )
        ),
        *(
            subtle(outcome, mistake, {count: 30}, timed_steps=96)
            for outcome, mistake in (
                ("exact", "none"),
                ("diverged", "no_exchange"),
                ("diverged", "half_undecayed"),
            )
            # A rewind restores either count, and losses stay within the envelope.
            for count in ("from_step", "from_optimizer_step")
        ),
    ]


def late_rows_by_design() -> list[Row]:
    rows: list[Row] = []
    for right, (_, late) in BY_DESIGN.items():
        if right != "diloco" or find_spec("torchft"):
            # The others are called every 3 steps.
            calls = 12 if right in ("powersgd", "post_local_sgd") else 4
            rows += [local(exact, right, "none", timed_steps=24)]
            rows += [local(diverges, right, mistake, calls, timed_steps=24) for mistake in late]
    return rows


@pytest.mark.parametrize(
    "rows", [late_rows, pytest.param(late_rows_by_design, marks=pytest.mark.thorough)]
)
def test_mistakes_after_the_parity_segment_are_reported(
    run_cells: RunCells, rows: Callable[[], list[Row]]
) -> None:
    check_rows(run_cells, rows(), timed_seconds=0.1)
