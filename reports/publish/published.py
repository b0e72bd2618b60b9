"""Published figures and their names, and a summary of what was written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.spec.cell import TECHNIQUES

CellRecord = Mapping[str, Any]

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
    """Allows MLflow's file store, which is opt-in since 3.0, and disables its usage telemetry."""
    import os

    wanted = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
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


def figures(record: CellRecord) -> dict[str, float]:
    return {name: float(record[name]) for name in FIGURES if record[name] is not None}


def loss_curve(record: CellRecord) -> Sequence[float | None]:
    """Returns the mean loss of each step, from the trial that determined parity."""
    return record["losses"] or []
