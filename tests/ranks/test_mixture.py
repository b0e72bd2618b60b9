"""Mixtures of experts: each token's experts are chosen by its own hidden state, so that data
parallelism changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.conftest import RunCells, cell

CELLS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp", "workload": "mixtral-nano"},
    "fsdp2": {"strategy": "fsdp2", "workload": "qwen3-moe-nano", "recompute": "full"},
    "trainer": {"strategy": "trainer", "workload": "qwen3-moe-nano", "recompute": "selective"},
    "zero3": {
        "strategy": "deepspeed",
        "workload": "qwen3-moe-nano",
        "options": {"stage": 3},
    },
}


@pytest.mark.parametrize("name", CELLS)
def test_it_is_the_same_training(run_cells: RunCells, name: str) -> None:
    trial = run_cells(cell(**CELLS[name])).trials.iloc[0]
    assert (trial["status"], trial["parity_verdict"]) == ("ok", "exact"), trial["reason"]
