"""transformers' architectures train in real ranks as in one process, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.cell.errors import Refused, UsageError
from harness.seam.registry import validate
from harness.workloads import make_workload
from tests.ranks.conftest import RunCells, cell
from tests.tiny_models import MODELS, MORE_MODELS, save_config

AXES: dict[str, Any] = {"warmup_steps": 1, "timed_steps": 2, "parity_steps": 3}
STRATEGIES: dict[str, dict[str, Any]] = {
    "single": {"devices": 1},
    "ddp": {},
    "fsdp2": {},
    "deepspeed": {"options": {"stage": 3}},
    "tensor": {},
    "pipeline": {"micro_batches": 2},
}
TRAINED = [model for model in (*MODELS, *MORE_MODELS) if model != "longformer"]
PLANNED = {"llama", "gemma3_text", "gpt_neox", "mixtral", "phi", "cohere"}
"""Some of the models that a pipeline must be able to split."""


def require_exact(run_cells: RunCells, folder: Path, models: list[str]) -> None:
    cells = []
    for model in models:
        workload = save_config(folder / model, model)
        data = "images" if "Image" in (MODELS | MORE_MODELS)[model][0] else "stdlib"
        for strategy, axes in STRATEGIES.items():
            of_model = cell(strategy, workload=workload, data=data, **AXES | axes)
            try:
                validate(of_model, make_workload(workload))
                cells.append(of_model)
            except Refused:
                may_be = strategy == "tensor" or (strategy == "pipeline" and model not in PLANNED)
                assert may_be, (model, strategy)
    trials = run_cells(*cells).trials
    assert len(trials) == len(cells)
    wrong = trials[trials["parity_verdict"] != "exact"]
    assert wrong[["cell_name", "status", "reason"]].to_numpy().tolist() == []


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_every_architecture_trains_as_in_one_process(run_cells: RunCells, tmp_path: Path) -> None:
    require_exact(run_cells, tmp_path, TRAINED)


def test_what_takes_neither_text_nor_images_nor_spectra_is_refused(tmp_path: Path) -> None:
    architecture = "MoonshineForConditionalGeneration"
    config = {"model_type": "moonshine", "architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="moonshine"):
        make_workload(f"hf:{tmp_path}")
