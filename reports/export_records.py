"""Runs for other programs: one record per cell, units in the names, the frames' own numbers,
unknown is null."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from typing import Any

from harness.record.run import RunRecord
from harness.record.trial import TrialRecord
from reports.run_report import RunReport


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


RUN = _names(
    "run_id started_at matrix host operating_system python_version torch_version cpu_model"
    " cpu_cores memory_bytes gpus gpu_memory_bytes git_commit suite_version schema_version"
)
IDENTITY = _names(
    "run_id cell_id cell_name label system strategy options workload data sequence_length devices"
    " device processes data_parallel pipeline_parallel tensor_parallel precision regime"
    " global_batch micro_batches optimizer launcher wraps_ddp threads_per_device"
)
FIGURES = _names(
    "status reason expected ranked place same_as_above trials disturbed_trials stand_in"
    " oversubscribed samples_per_second samples_per_second_low samples_per_second_high"
    " tokens_per_second tokens_per_second_low tokens_per_second_high step_seconds_p50"
    " step_seconds_p95 data_seconds_p50 setup_seconds startup_seconds first_step_seconds"
    " wall_seconds trend efficiency_own efficiency_single flops_per_step mfu bubble_fraction"
    " energy_joules_per_sample peak_memory_bytes peak_memory_bytes_low memory_imbalance"
    " memory_method parameter_bytes gradient_bytes optimizer_bytes library_bytes state_bytes"
    " formula_bytes formula_transient_bytes formula_deviation host_state_bytes sent_bytes_per_step"
    " offload_read_bytes_per_step offload_written_bytes_per_step offload_kept_bytes parameters"
    " trained_parameters parity_verdict parity_reason parity_steps parity_max_loss_deviation"
    " parity_loss_tolerance parity_max_update_deviation parity_update_tolerance fp32_loss_deviation"
)
LISTS = ("peak_memory_bytes_by_rank", "losses", "reference_losses", "samples_per_second_by_trial")
"""Columns of JSON only."""
_WHOLE = {c.name for table in (RunRecord, TrialRecord) for c in table.columns() if c.is_integer}
"""What a frame with a null among them holds as floats."""
_FORMULA_STARTS = tuple("=+-@\t\r")


def known(value: Any) -> Any:
    """A frame's value as JSON has it: null for NaN, infinity and NaT; numpy's numbers and arrays as
    Python's, times as ISO 8601."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, dict):
        return {str(key): known(one) for key, one in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [known(one) for one in value]
    if value != value:
        return None
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def records(one: RunReport) -> list[dict[str, Any]]:
    """A record for each cell of a run, ranked ones first in the order of their groups."""
    ranked = {row["cell_id"]: row for group in one.groups for row in group.rows}
    rest = [row for row in one.cells if row["cell_id"] not in ranked]
    found = []
    for row in [*ranked.values(), *rest]:
        named = row | {
            "disturbed_trials": row["disturbed"],
            "samples_per_second_by_trial": row["by_round"],
        }
        found.append(
            {name: _whole(name, known(named.get(name))) for name in (*IDENTITY, *FIGURES, *LISTS)}
        )
    return found


def _whole(name: str, value: Any) -> Any:
    return (
        int(value) if name in _WHOLE and isinstance(value, float) and value.is_integer() else value
    )


def as_json(runs: Sequence[RunReport], **more: Any) -> str:
    """`{"runs": [...], "cells": [...], ...}`; every cell's record names its run."""
    told = [{name: _whole(name, known(one.run.get(name))) for name in RUN} for one in runs]
    cells = [record for one in runs for record in records(one)]
    return (
        json.dumps({"runs": told, "cells": cells, **known(more)}, indent=1, allow_nan=False) + "\n"
    )


def as_csv(runs: Sequence[RunReport]) -> str:
    """A line per run and cell, after a line of names; numbers in full precision, unknown is empty,
    true and false in words."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*IDENTITY, *FIGURES])
    for one in runs:
        for record in records(one):
            writer.writerow([_field(record[name]) for name in (*IDENTITY, *FIGURES)])
    return out.getvalue()


def _field(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # A spreadsheet takes a text that begins so for a formula and would run it (CWE-1236).
        return f"'{value}" if value.startswith(_FORMULA_STARTS) else value
    return repr(value)
