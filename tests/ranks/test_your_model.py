"""A user's own models: real ranks train each as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.ranks.conftest import RunCells, cell
from tests.tiny_models import save_config

MICRO: dict[str, Any] = {"warmup_steps": 1, "timed_steps": 2, "parity_steps": 3}
STRATEGIES: dict[str, tuple[str, ...]] = {
    "llama": ("pipeline", "fsdp1"),
    "qwen3": ("tensor",),
    "gemma3_text": ("pipeline",),
    "t5": ("fsdp2",),
    "roberta": ("ddp",),
}


def test_models_train_as_in_one_process(run_cells: RunCells, tmp_path: Path) -> None:
    cells = []
    for model, strategies in STRATEGIES.items():
        workload = save_config(tmp_path / model, model)
        data = "images" if model == "vit" else "stdlib"
        for strategy in strategies:
            parts = 2 if "pipeline" in strategy else 1
            axes = {"workload": workload, "data": data, "micro_batches": parts, **MICRO}
            cells.append(cell(strategy, **axes))
    trials = run_cells(*cells).trials
    verdicts = {(t.workload, t.strategy): (t.parity_verdict, t.reason) for t in trials.itertuples()}
    assert {v for v, _ in verdicts.values()} == {"exact"}, verdicts
    assert len(verdicts) == sum(len(strategies) for strategies in STRATEGIES.values())
