"""Rows of runs and trials for a results folder, successful by default."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from harness.cell.cell import Cell
from harness.record.files import VERSION, arrow_schema
from harness.record.plan import Plan
from harness.record.run_record import StepRecord
from harness.record.store import TrialKey
from tests.unit.made_results import run_row
from tests.unit.recording import left_out_fields

if TYPE_CHECKING:
    import pandas as pd


def one_cell_run(run_id: str = "run-1") -> dict[str, Any]:
    """Returns the row of a run with one planned cell."""
    plan = Plan(run_id, "test", (Cell(strategy="single"),), 1)
    return run_row(
        run_id=run_id,
        schema_version=VERSION,
        started_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc),
        matrix="test",
        plan=plan.to_json(),
        libraries="{}",
        cpu_model=None,
        git_commit=None,
    )


def trial_row(cell: Cell, trial: int = 0, run_id: str = "run-1", **more: Any) -> dict[str, Any]:
    """Returns the row of a successful trial. `more`: further or other values."""
    good = {
        "status": "ok",
        "reason": "",
        "samples_per_second": 10.0,
        "step_seconds_p50": 0.8,
        "trend": 0.0,
        "peak_memory_bytes": 100,
        "parity_verdict": "exact",
        "parity_max_loss_deviation": 0.0,
    }
    return {**left_out_fields(run_id, cell, "ok", ""), "trial": trial, **good, **more}


def step(key: TrialKey, number: int = 0, rank: int = 0, run_id: str = "run-1") -> StepRecord:
    return StepRecord(
        run_id=run_id,
        cell_id=key.cell_id,
        trial=key.trial,
        attempt=key.attempt,
        rank=rank,
        step=number,
        phase="timed",
        data_seconds=0.1,
        step_seconds=1.0,
    )


def frame_of(trials: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Returns the trials as a frame, with null for missing values."""
    import pandas as pd

    return pd.DataFrame(
        [{name: row.get(name) for name in arrow_schema("trials").names} for row in trials]
    )
