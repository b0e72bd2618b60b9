"""Exports one record per cell: units in the names, unrounded numbers, null for unknown."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from harness.analysis.cell_result import CellResult
from harness.cell.cell import TECHNIQUES
from reports.run_report import RunReport


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.replace("*", "").split())


def _starred(text: str) -> tuple[str, ...]:
    return _names(" ".join(name for name in text.split() if name.endswith("*")))


RUN = _names(
    "run_id started_at matrix host operating_system python_version torch_version cpu_model"
    " cpu_cores memory_bytes gpus gpu_memory_bytes git_commit suite_version schema_version"
)
# A star marks what other tools get, too.
_IDENTITY = (
    "run_id cell_id cell_name label* system strategy* options* workload* data* sequence_length*"
    " devices* device* processes data_parallel pipeline_parallel tensor_parallel sequence_parallel"
    f" precision* regime* global_batch* {'* '.join(TECHNIQUES)}* optimizer* launcher* wraps_ddp"
    " threads_per_device"
)
_FIGURES = (
    "status reason expected ranked place may_be_fastest trials disturbed_trials stand_in"
    " oversubscribed samples_per_second* samples_per_second_low* samples_per_second_high*"
    " tokens_per_second* tokens_per_second_low* tokens_per_second_high* step_seconds_p50*"
    " step_seconds_p95* data_seconds_p50* setup_seconds* startup_seconds first_step_seconds"
    " compile_seconds wall_seconds trend baseline over_baseline over_baseline_low"
    " over_baseline_high efficiency_own* efficiency_single* flops_per_step hardware_flops_per_step"
    " mfu* matmul_utilization* peak_flops_per_second matmul_flops_per_second"
    " bubble_fraction expert_imbalance energy_joules_per_sample*"
    " peak_memory_bytes* peak_memory_bytes_low"
    " memory_imbalance memory_method parameter_bytes gradient_bytes optimizer_bytes library_bytes"
    " state_bytes* formula_bytes formula_transient_bytes formula_deviation host_state_bytes"
    " sent_bytes_per_step* offload_read_bytes_per_step offload_written_bytes_per_step"
    " offload_kept_bytes checkpoint_bytes checkpoint_files checkpoint_save_seconds"
    " checkpoint_blocked_seconds checkpoint_load_seconds checkpoint_restores_random"
    " checkpoint_restores_bits parameters trained_parameters parity_verdict parity_reason"
    " parity_steps verified_steps"
    " parity_max_loss_deviation* parity_loss_tolerance parity_max_update_deviation*"
    " parity_update_tolerance fp32_loss_deviation"
)
IDENTITY, FIGURES = _names(_IDENTITY), _names(_FIGURES)
AXES, PUBLISHED = _starred(_IDENTITY), _starred(_FIGURES)
TRIAL_FIGURES = ("samples_per_second", "step_seconds_p50", "peak_memory_bytes")
"""Figures of each trial that other tools get, too."""
LISTS = (
    *("differences", "peak_memory_bytes_by_rank", "losses", "reference_losses"),
    "samples_per_second_by_trial",
)
_FORMULA_STARTS = tuple("=+-@\t\r")


def for_json(value: object) -> object:
    """Converts non-finite numbers to null and times to ISO 8601."""
    if isinstance(value, Mapping):
        return {str(key): for_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [for_json(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def records(report: RunReport) -> list[dict[str, Any]]:
    ranked = [cell for group in report.groups for cell in group.rows]
    return list(map(record_of, [*ranked, *(cell for cell in report.cells if not cell.ranked)]))


def record_of(cell: CellResult) -> dict[str, Any]:
    """Returns a cell's JSON record, in which the rank `place` is null if the cell is not ranked."""
    fields = cell.columns() | {
        "disturbed_trials": cell.disturbance.trials,
        "samples_per_second_by_trial": cell.speed.by_round,
    }
    return {name: for_json(fields.get(name)) for name in (*IDENTITY, *FIGURES, *LISTS)}


def as_json(reports: Sequence[RunReport], **more: object) -> str:
    runs = [{name: for_json(getattr(report.run, name)) for name in RUN} for report in reports]
    cells = [record for report in reports for record in records(report)]
    whole = {
        "runs": runs,
        "cells": cells,
        **{name: for_json(value) for name, value in more.items()},
    }
    return json.dumps(whole, indent=1, allow_nan=False) + "\n"


def as_csv(reports: Sequence[RunReport]) -> str:
    """Returns a header and a full-precision line per run and cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*IDENTITY, *FIGURES])
    for report in reports:
        for record in records(report):
            writer.writerow([_field(record[name]) for name in (*IDENTITY, *FIGURES)])
    return out.getvalue()


def _field(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # A spreadsheet would run a text that begins like this as a formula (CWE-1236).
        return f"'{value}" if value.startswith(_FORMULA_STARTS) else value
    return repr(value)
