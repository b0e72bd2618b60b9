"""Mixtures of experts route each token by its own hidden state, so data parallelism is exact."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.ranks.conftest import RunCells, cell, representative

CELLS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp", "workload": "mixtral-nano"},
    "fsdp2": {"strategy": "fsdp2", "workload": "qwen3-moe-nano", "recompute": "full"},
    "trainer": {"strategy": "trainer", "workload": "qwen3-moe-nano", "recompute": "selective"},
    "zero3": {
        "strategy": "deepspeed",
        "workload": "qwen3-moe-nano",
        "options": {"stage": 3},
    },
    # transformers loads it in parts; Accelerate takes its config on GPUs only.
    "tensor": {
        "strategy": "parallelism_config",
        "workload": "qwen3-moe-nano",
        "options": {"tensor": 2},
    },
    # Gradients are scattered after each micro-batch, and all-reduced after the last.
    "replicas": {
        "strategy": "distributed_config",
        "workload": "mixtral-nano",
        "devices": 4,
        "micro_batches": 2,
        "options": {"replicas": 2, "expert": 2},
    },
}


@pytest.mark.parametrize("names", representative([["replicas"], [*CELLS][:-1]]), ids=str)
def test_it_is_the_same_training(run_cells: RunCells, names: list[str]) -> None:
    """Expert tokens are counted once: two for each of 8 samples of 32 tokens.

    Recomputed blocks and samples shared by ranks are not counted again.
    """
    for trial in run_cells(*(cell(**CELLS[name]) for name in names)).trials.to_dict("records"):
        assert (trial["status"], trial["parity_verdict"]) == ("ok", "exact"), trial["reason"]
        assert [sum(tokens) for tokens in json.loads(trial["expert_tokens"])] == [2 * 8 * 32] * 2
        assert 1 <= trial["expert_imbalance"] <= 2
