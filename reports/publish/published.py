"""Published figures and their names, and a summary of what was written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.spec.cell import TECHNIQUES
from reports import run_facts

if TYPE_CHECKING:
    from reports.run_report import RunReport

CellRecord = Mapping[str, Any]
RUN_TAG, CELL_TAG = "bench.run_id", "bench.cell_id"

FIGURES = (
    "samples_per_second",
    "samples_per_second_low",
    "samples_per_second_high",
    "tokens_per_second",
    "tokens_per_second_low",
    "tokens_per_second_high",
    "step_seconds_p50",
    "step_seconds_p95",
    "data_seconds_p50",
    "setup_seconds",
    "peak_memory_bytes",
    "state_bytes",
    "sent_bytes_per_step",
    "efficiency_own",
    "efficiency_single",
    "mfu",
    "matmul_utilization",
    "energy_joules_per_sample",
    "parity_max_loss_deviation",
    "parity_max_update_deviation",
)

TRIAL_FIGURES = ("samples_per_second", "step_seconds_p50", "peak_memory_bytes")


AXES = (
    "strategy",
    "label",
    "options",
    "workload",
    "data",
    "sequence_length",
    "devices",
    "device",
    "precision",
    "regime",
    "global_batch",
    *TECHNIQUES,
    "optimizer",
    "launcher",
)


@dataclass(frozen=True)
class Published:
    path: Path
    cells: int
    already: int
    """Existing cells left unchanged."""


@contextmanager
def quiet() -> Iterator[None]:
    """Allows MLflow's file store, which is opt-in since 3.0, and disables the telemetry of MLflow
    and W&B."""
    wanted = {
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "WANDB_ERROR_REPORTING": "false",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def tags_of(report: RunReport, record: CellRecord) -> dict[str, str]:
    return {
        RUN_TAG: report.run_id,
        CELL_TAG: record["cell_id"],
        "bench.status": record["status"],
        "bench.reason": record["reason"],
        "bench.parity": record["parity_verdict"] or "",
        "bench.matrix": report.run.matrix,
        "bench.hardware": run_facts.hardware(report.run),
        "bench.commit": report.run.git_commit or "",
    }


def figures(record: CellRecord) -> dict[str, float]:
    return {name: float(record[name]) for name in FIGURES if record[name] is not None}


def loss_curve(record: CellRecord) -> Sequence[float | None]:
    """Returns each step's mean loss, from the trial that determined parity."""
    return record["losses"] or []
