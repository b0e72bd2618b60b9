"""Wrong trainings diverge or are not advised; right but unusual ones never diverge.

Each row is a strategy with one mistake in one setting (tests/plugin/bench_plugin).
"""

from __future__ import annotations

from typing import Any

import pytest

from harness.analysis.summary import cell_results
from harness.cell.cell import Cell
from tests.ranks.conftest import RunCells, cell, representative

MUON: dict[str, Any] = {"optimizer": "muon"}
EIGHT_BITS: dict[str, Any] = {"optimizer": "adamw_8bit", "workload": "llama-micro"}
BF16: dict[str, Any] = {"precision": "bf16"}
MIXTURE: dict[str, Any] = {"workload": "mixtral-nano", "precision": "bf16"}
IMAGES: dict[str, Any] = {"workload": "resnet-micro", "precision": "bf16", "global_batch": 16}
MIXED: dict[str, Any] = {"precision": "bf16", "options": {"mixed_precision": True}}
ZERO2: dict[str, Any] = {"precision": "bf16", "options": {"stage": 2}}
CLIPPED: dict[str, Any] = {"precision": "bf16", "clip_norm": 0.6}
STORED: dict[str, Any] = {"workload": "llama-nano+bf16"}

WRONG: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "muon": (
        "ddp",
        MUON,
        (
            *("no_nesterov", "other_momentum", "momentum_1_percent_off", "no_decay"),
            *("no_decay_by_muon", "half_decay", "fewer_iterations", "unadjusted_rate"),
            *("rate_3_percent_off", "gradients_in_bf16", "moments_in_bf16"),
        ),
    ),
    "muon, FSDP2": ("fsdp2", MUON, ("each_shard_alone", "no_nesterov", "no_decay_by_muon")),
    **{
        f"muon, DeepSpeed ZeRO-{stage}": (
            "deepspeed",
            MUON | {"options": {"stage": stage}},
            ("each_shard_alone", "other_momentum", "half_decay", "rate_3_percent_off"),
        )
        for stage in (1, 2, 3)
    },
    "muon, bf16": (
        "ddp",
        MUON | BF16,
        ("no_nesterov", "other_momentum", "no_decay", "fewer_iterations", "rate_3_percent_off"),
    ),
    "8-bit AdamW": (
        "ddp",
        EIGHT_BITS,
        ("no_decay", "half_decay", "default_betas", "other_beta1", "rate_1_percent_off"),
    ),
    "mixture": (
        "ddp",
        MIXTURE,
        (
            *("no_decay", "half_decay", "gradients_4_percent_large", "moments_in_8_bits"),
            *("moments_in_bf16", "expert_gradients_halved", "router_frozen", "other_beta1"),
            *("router_gradients_doubled", "other_beta2", "rate_3_percent_off", "clipped"),
            *("rounded_weights", "vectors_frozen", "one_step_ahead", "norm_epsilon"),
        ),
    ),
    "mixture, FSDP2": (
        "fsdp2",
        MIXTURE | MIXED,
        ("no_decay", "gradients_4_percent_large", "moments_in_8_bits", "expert_gradients_halved"),
    ),
    "mixture, DeepSpeed": (
        "deepspeed",
        MIXTURE | ZERO2,
        ("no_decay", "gradients_4_percent_large", "moments_in_8_bits", "one_step_ahead"),
    ),
    "BatchNorm": (
        "ddp",
        IMAGES,
        (
            *("no_decay", "half_decay", "gradients_4_percent_large", "moments_in_8_bits"),
            *("statistics_twice_as_fast", "statistics_frozen", "batch_norm_epsilon"),
            *("other_beta1", "default_betas", "rate_3_percent_off", "delayed", "clipped"),
        ),
    ),
    "BatchNorm of all ranks": (
        "sync_batch_norm",
        IMAGES,
        ("no_decay", "gradients_4_percent_large", "statistics_twice_as_fast", "default_betas"),
    ),
    "FSDP2, bf16": (
        "fsdp2",
        MIXED,
        (
            *("no_decay", "half_decay", "other_beta1", "moments_in_8_bits", "rounded_weights"),
            *("gradients_4_percent_large", "rate_1_percent_off", "other_epsilon", "delayed"),
            "smallest_dropped",
        ),
    ),
    "DeepSpeed, bf16": (
        "deepspeed",
        ZERO2,
        (
            *("no_decay", "one_step_ahead", "moments_in_bf16", "gradients_4_percent_large"),
            *("rounded_weights", "first_moment_in_fp16", "clipped", "rate_1_percent_off"),
        ),
    ),
    "autocast": (
        "ddp",
        BF16,
        (
            *("half_decay", "gradients_4_percent_large", "moments_in_8_bits", "other_beta2"),
            *("rate_3_percent_off", "norm_epsilon", "attention_scale", "vectors_frozen"),
        ),
    ),
    "clipping in bf16": ("ddp", CLIPPED, ("embedding_counted_twice", "norm_1_5_percent_large")),
    "weights in bf16": (
        "ddp",
        STORED,
        ("default_betas", "gradients_4_percent_large", "moments_in_8_bits", "clipped"),
    ),
}
"""Strategy, setting and mistakes, by subject."""

SLOW_RATE: dict[str, Any] = {"learning_rate": 1e-5}
RIGHT: list[tuple[str, dict[str, Any]]] = [
    ("ddp", MUON),
    ("ddp", MUON | {"micro_batches": 4, "seed": 1}),
    ("fsdp2", MUON | {"seed": 2}),
    *(("deepspeed", MUON | {"options": {"stage": stage}}) for stage in (0, 1, 2, 3)),
    ("deepspeed", MUON | {"options": {"stage": 2}, "seed": 1, "micro_batches": 2}),
    ("deepspeed", MUON | {"options": {"stage": 3}, "seed": 2, "decay": "matrices"}),
    ("ddp", MUON | BF16),
    ("fsdp2", MUON | BF16 | {"seed": 1, "micro_batches": 2}),
    ("ddp", EIGHT_BITS),
    ("ddp", EIGHT_BITS | {"seed": 1, "micro_batches": 2}),
    ("ddp", MIXTURE),
    ("ddp", MIXTURE | {"seed": 1, "micro_batches": 4}),
    ("ddp", MIXTURE | {"seed": 2, "recompute": "full"}),
    ("fsdp2", MIXTURE | MIXED | {"seed": 3}),
    ("fsdp2", MIXTURE | {"seed": 4, "micro_batches": 2}),
    ("deepspeed", MIXTURE | ZERO2 | {"seed": 5}),
    ("deepspeed", MIXTURE | {"options": {"stage": 3, "bucket_elements": 5000}, "micro_batches": 2}),
    ("distributed_config", MIXTURE | {"options": {"expert": 2}, "seed": 6}),
    ("ddp", IMAGES),
    ("ddp", IMAGES | {"seed": 1}),
    ("sync_batch_norm", IMAGES),
    ("sync_batch_norm", IMAGES | {"seed": 1}),
    ("ddp", STORED),
    ("ddp", STORED | {"seed": 1, "micro_batches": 2}),
    ("ddp", BF16 | SLOW_RATE | {"optimizer": "adamw_fused"}),
    ("ddp", BF16 | SLOW_RATE | {"optimizer": "adamw_foreach", "seed": 1}),
    ("ddp", SLOW_RATE | {"optimizer": "adamw_fused"}),
    ("adamw_in_double", SLOW_RATE),
    ("adamw_in_double", BF16 | SLOW_RATE),
    ("adamw_in_double", SLOW_RATE | {"weight_decay": 0.1}),
    ("deepspeed", SLOW_RATE | {"options": {"stage": 2, "offload_optimizer": "cpu"}}),
    ("deepspeed", BF16 | SLOW_RATE | {"options": {"stage": 2, "offload_optimizer": "cpu"}}),
    ("ddp", BF16 | {"options": {"bucket_cap_mb": 0.01}}),
    ("ddp", BF16 | {"options": {"static_graph": True, "gradient_as_bucket_view": True}}),
    ("ddp", BF16 | {"optimizer": "adamw_foreach", "micro_batches": 4}),
    ("ddp", BF16 | {"compile": "block"}),
    ("fsdp2", MIXED | {"micro_batches": 2, "seed": 1}),
    ("fsdp2", BF16 | {"options": {"reshard_after_forward": False, "prefetch": True}}),
    ("deepspeed", BF16 | {"options": {"stage": 3, "bucket_elements": 3000}, "micro_batches": 2}),
    ("ddp", CLIPPED | {"micro_batches": 2}),
    ("tensor", CLIPPED),
    ("horovod", CLIPPED | {"seed": 1}),
    ("tensor", BF16 | {"workload": "gpt2-nano"}),
    ("pipeline", BF16 | {"micro_batches": 4}),
]
"""Right but unusual trainings: other bucket sizes, orders of addition, optimizers and rates."""


def wrong_cells(subject: str) -> dict[str, Cell]:
    strategy, axes, mistakes = WRONG[subject]
    found = {}
    for mistake in mistakes:
        options = {**axes.get("options", {}), "mistake": mistake}
        found[mistake] = cell(f"mistaken_{strategy}", **axes | {"options": options})
    return found


@pytest.mark.parametrize("subject", representative(sorted(WRONG, key=lambda s: len(WRONG[s][2]))))
def test_a_wrong_training_diverges_or_is_not_advised(run_cells: RunCells, subject: str) -> None:
    cells = wrong_cells(subject)
    found = {result.cell_id: result for result in cell_results(run_cells(*cells.values()).trials)}
    missed = {}
    for mistake, one in cells.items():
        result = found[one.id]
        assert result.status in ("ok", "diverged"), (mistake, result.reason)
        if result.status == "ok" and result.parity.same_training:
            missed[mistake] = result.parity
    assert missed == {}


@pytest.mark.thorough
def test_a_right_but_unusual_training_never_diverges(run_cells: RunCells) -> None:
    rows = [cell(strategy, **axes) for strategy, axes in RIGHT]
    found = run_cells(*rows).trials.to_dict("records")
    wrong = {trial["cell_id"]: trial["reason"] for trial in found if trial["status"] != "ok"}
    assert wrong == {}
