"""transformers' architectures: trained by real ranks as by one process, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.spec.errors import Refused, UsageError
from harness.strategy.registry import validate
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


def outcomes(run_cells: RunCells, folder: Path, models: list[str]) -> dict[tuple[str, str], str]:
    """Returns verdicts or statuses by model and strategy; empty if the cell was refused."""
    found, cells = {}, {}
    for model in models:
        workload = save_config(folder / model, model)
        for strategy, axes in STRATEGIES.items():
            data = "images" if "Image" in (MODELS | MORE_MODELS)[model][0] else "stdlib"
            of_model = cell(strategy, workload=workload, data=data, **AXES | axes)
            try:
                validate(of_model, make_workload(workload))
            except (Refused, UsageError) as error:
                print(model, strategy, "refused:", error)
                found[model, strategy] = ""
                continue
            cells[of_model.id] = (model, strategy)
            found[model, strategy] = "not run"
            trials = run_cells(of_model).trials
            (trial,) = trials.itertuples()
            verdict = trial.parity_verdict if trial.status == "ok" else trial.status
            print(
                model,
                strategy,
                verdict,
                trial.reason,
                trial.parity_reason if hasattr(trial, "parity_reason") else "",
                flush=True,
            )
            found[model, strategy] = verdict
    return found


@pytest.mark.thorough
def test_every_architecture_trains_as_in_one_process(run_cells: RunCells, tmp_path: Path) -> None:
    found = outcomes(run_cells, tmp_path, [*MODELS, *MORE_MODELS])
    wrong = {of: outcome for of, outcome in found.items() if outcome not in ("", "exact")}
    assert not wrong
