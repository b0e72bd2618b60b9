"""Handmade runs and trials, as a results folder has them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from harness.analysis.cell_result import CellResult
from harness.analysis.summary import cell_results
from harness.cell.cell import Cell
from harness.cell.training import REASONS, half_precision
from harness.parity.verdict import PRECISION
from harness.record.files import VERSION
from harness.record.plan import Plan
from harness.record.run_record import RunRecord
from harness.record.store import Results, Store
from harness.record.trial import TrialRecord
from tests.unit.recording import left_out_fields

REFERENCE = [4.0, 3.5, 3.1, 2.9]
MIB = 2**20


def run_row(**changes: Any) -> dict[str, Any]:
    row = {
        "schema_version": VERSION,
        "run_id": "20260101T000000-abcd",
        "started_at": datetime(2026, 1, 1, tzinfo=timezone.utc),
        "matrix": "full",
        "plan": json.dumps({"cells": [], "trials": 3, "order_seed": 7, "left_out": []}),
        "host": "bench-host",
        "operating_system": "Linux",
        "python_version": "3.11.7",
        "torch_version": "2.13.0",
        "libraries": json.dumps({"numpy": "2.4.6"}),
        "cpu_model": "Example CPU",
        "cpu_cores": 2,
        "memory_bytes": 8 * 2**30,
        "gpus": [],
        "gpu_memory_bytes": None,
        "git_commit": "0123abc",
        "suite_version": "0.1.0",
    }
    return row | changes


def trial_rows(
    cell: Cell, speeds: Sequence[float], peak_mib: float = 100.0, **changes: Any
) -> list[dict[str, Any]]:
    """Returns finished trials of a cell, one per throughput (samples/s)."""
    rows = []
    for trial, speed in enumerate(speeds):
        row = left_out_fields("20260101T000000-abcd", cell, "ok", "") | {
            "schema_version": VERSION,
            "trial": trial,
            "position": trial,
            "wall_seconds": 2.0,
            "startup_seconds": 0.2,
            "setup_seconds": 0.123456789,
            "first_step_seconds": 0.4,
            "processes": cell.devices,
            "data_parallel": cell.devices,
            "pipeline_parallel": 1,
            "tensor_parallel": 1,
            "stand_in": None,
            "parameters": 1000,
            "step_seconds_p50": cell.global_batch / speed,
            "step_seconds_p95": cell.global_batch / speed * 1.1,
            "samples_per_second": speed,
            "tokens_per_second": None if cell.data == "images" else speed * cell.sequence_length,
            "trend": 0.0,
            "peak_memory_bytes": int((peak_mib + trial) * MIB),
            "memory_imbalance": 1.05,
            "memory_method": "counted by hand",
            "losses": [loss * (1 + 1e-7) for loss in REFERENCE],
            "reference_losses": REFERENCE,
            "parity_verdict": "exact",
            "parity_reason": "",
            "parity_max_loss_deviation": 1.25e-7,
            "parity_max_update_deviation": 3e-5,
            "parity_loss_tolerance": 1e-5,
            "parity_update_tolerance": 1e-3,
        }
        rows.append(row | changes)
    return rows


def diverged_rows(cell: Cell, **changes: Any) -> list[dict[str, Any]]:
    more: dict[str, Any] = {
        "status": "diverged",
        "reason": "loss is not finite at step 2",
        "parity_verdict": "diverged",
        "parity_reason": "loss is not finite at step 2",
        "parity_max_loss_deviation": None,
        "losses": [4.0, 5.5, math.nan, math.nan],
        "log_tail": "the last line of the log",
    }
    return trial_rows(cell, [9999.0, 9998.0], **more | changes)


def left_out(cell: Cell, status: str, reason: str, **changes: Any) -> list[dict[str, Any]]:
    return [left_out_fields("20260101T000000-abcd", cell, status, reason) | changes]


def stored(folder: Path, rows: Sequence[dict[str, Any]], **run: Any) -> Results:
    """Writes a run with these trials to a folder, and loads it."""
    store = Store(folder)
    store.write_run(RunRecord(**run_row(**run)))
    for row in rows:
        store.write_trial(TrialRecord(**row))
    return store.load()


STATES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "library_bytes")
BUCKETS = "gradient buckets"


def states(
    *sizes: Sequence[int], formula: Sequence[float] | None = None, **more: Any
) -> dict[str, Any]:
    """Returns state columns. `sizes`: MiB of parameters, gradients, optimizer, library by rank."""
    columns: dict[str, Any] = {
        name: [rank[kind] * MIB for rank in sizes] for kind, name in enumerate(STATES)
    }
    columns |= {
        f"formula_{name}": value * MIB for name, value in zip(STATES, formula or (), strict=False)
    }
    columns |= {
        "host_state_bytes": [0] * len(sizes),
        "library_buffers": json.dumps({BUCKETS: sizes[0][3] * MIB, "tiny": 8}),
    }
    return columns | more


def sharded() -> list[dict[str, Any]]:
    """Returns cells with states, traffic, wrappers, variants and a disk; all, some or none of a
    system's cells ran."""
    system = "3 wrapped"
    sizes = {"trained_parameters": MIB, "parameters": MIB}
    rank = (4, 0, 8, 4)
    whole = states(rank, rank, formula=rank, **sizes)
    whole["sent_bytes_per_step"] = [4.0 * MIB, 3.9 * MIB]
    rows = []
    for name, wraps, speed in (("plain", "torchrun", 50.0), ("wrap", "Wrapper", 40.0)):
        cell = Cell(strategy=name, devices=2, system=system)
        rows += trial_rows(cell, [speed, speed + 1, speed - 1], **whole, wraps_ddp=wraps)
    cut = states((2, 0, 4, 0), (1, 0, 2, 1), formula=(2, 0, 5, 0), **sizes)
    disk = {
        "offload_read_bytes_per_step": 3.0 * MIB,
        "offload_written_bytes_per_step": 5.0 * MIB,
        "offload_kept_bytes": 7 * MIB,
    }
    peaks = {"peak_memory_bytes_by_rank": [100 * MIB, 50 * MIB]}
    cell = Cell(strategy="sharded", devices=2, system="10 disks")
    rows += trial_rows(
        cell, [30.0, 31.0], **cut, **disk, **peaks, sent_bytes_per_step=[6.0 * MIB, 2.0 * MIB]
    )
    few = states((4, 0, 1, 1), (4, 0, 1, 1), **sizes | {"trained_parameters": MIB // 8})
    few["fp32_loss_deviation"] = 0.003
    cell = Cell(strategy="plain", devices=2, workload="llama-mini+nf4+lora", system="21 adapters")
    rows += trial_rows(cell, [60.0, 61.0], **few, sent_bytes_per_step=[0.5 * MIB, 0.5 * MIB])
    disk_cell = Cell(strategy="disk", devices=2, system="10 disks")
    rows += left_out(disk_cell, "unavailable", "there is no disk: mount one")
    rare = Cell(strategy="rare", devices=2, system="6 Rare")
    for one in (rare, rare.model_copy(update={"options": {"a": 1}})):
        needed = "package rare is not installed: pip install rare"
        rows += left_out(one, "unavailable", needed)
    more = rare.model_copy(update={"devices": 3})
    return rows + left_out(more, "refused", "batch 8 does not divide by 3")


def typical() -> list[dict[str, Any]]:
    """Returns all a run may contain: overlapping intervals, single trials, stand-ins, failures."""
    many = trial_rows(Cell(strategy="fast", devices=2), [70.0, 71.0, 72.0], peak_mib=300)
    many += trial_rows(Cell(strategy="near", devices=2), [69.0, 71.0, 70.5], peak_mib=200)
    many += trial_rows(
        Cell(strategy="small", devices=2, micro_batches=4),
        [30.0, 30.1, 30.2],
        50,
        pipeline_parallel=2,
        bubble_fraction=0.31,
    )
    many += trial_rows(
        Cell(strategy="once", devices=2), [20.0], stand_in="threads instead of devices", trend=0.07
    )
    many += trial_rows(Cell(strategy="crowd", devices=8), [5.0, 5.5], oversubscribed=True)
    many += trial_rows(Cell(strategy="fast", devices=1), [40.0, 41.0, 40.5])
    many += trial_rows(
        Cell(strategy="fast", devices=2, data="images", workload="resnet-micro"), [9.0, 9.1]
    )
    many += diverged_rows(Cell(strategy="wrong", devices=2))
    many += diverged_rows(Cell(strategy="known", devices=2, expect="diverged"), expected=True)
    many += left_out(
        Cell(strategy="broken", devices=2),
        "failed",
        "rank 1: it broke; mend it",
        log_tail="Traceback of rank 1",
    )
    many += left_out(
        Cell(strategy="absent", devices=2),
        "unavailable",
        "package absent is not installed: pip install absent",
    )
    many += left_out(Cell(strategy="odd", devices=3), "refused", "batch 8 does not divide by 3")
    return many


def rows_of(results: Results) -> dict[str, CellResult]:
    """Returns cells in ranking order by label, workload and, above 2, number of devices."""
    return {
        f"{cell.cell.label} {cell.cell.workload}"
        + (f" x{cell.cell.devices}" if cell.cell.devices > 2 else ""): cell
        for cell in cell_results(results.trials)
    }


def searched(folder: Path) -> Results:
    """Returns a search in which `less` reaches 3 blocks and `more` 2, the opposite of theory."""
    family = {"workload": "llama-64x1", "devices": 2, "memory_limit_bytes": MIB}
    cells = [Cell(strategy=name, **family) for name in ("less", "more", "never")]
    known = {
        cell.id: {"step": 10, "blocks": 4, "parameters": 40, "activations": [0, 0]}
        for cell in cells
    }
    search = {"budget": MIB, "order": [["less", "more"]], "predicted": known}
    plan = {
        "cells": [json.loads(c.model_dump_json()) for c in cells],
        "trials": 1,
        "order_seed": 0,
        "left_out": [],
        "search": search,
    }
    rows = []
    for cell, most in zip(cells, (3, 2), strict=False):
        for blocks, status in ((most, "ok"), (most + 1, "out_of_memory")):
            sized = cell.model_copy(update={"workload": f"llama-64x{blocks}"})
            probe = states(
                (1, 0, 2, 0), (1, 0, 2, 0), trained_parameters=10 * blocks, parameters=10 * blocks
            )
            (row,) = trial_rows(
                sized,
                [5.0],
                **probe,
                status=status,
                parity_verdict="unknown" if status == "ok" else None,
            )
            rows.append(
                row
                | ({"samples_per_second": None, "failed_in": "backward"} if status != "ok" else {})
            )
            if status == "ok":
                (row,) = trial_rows(sized, [5.0], **probe)
                rows.append(row | {"trial": 1})
    return stored(folder, rows, matrix="maxsize", plan=json.dumps(plan))


def half_rows(
    cell: Cell, speeds: Sequence[float], *own_reasons: str, **changes: Any
) -> list[dict[str, Any]]:
    """Returns finished trials in half precision, within its tolerance.

    `own_reasons`: further reasons, which the strategy declares.
    """
    allowed = PRECISION[half_precision(cell.precision, cell.workload)]
    more: dict[str, Any] = {
        "schema_version": VERSION,
        "oversubscribed": False,
        "parity_verdict": "within tolerance",
        "parity_reason": REASONS.join([*own_reasons, allowed.reason]),
        "parity_max_loss_deviation": allowed.loss / 4,
        "parity_max_update_deviation": allowed.update / 4,
        "parity_loss_tolerance": allowed.loss,
        "parity_update_tolerance": allowed.update,
    }
    return trial_rows(cell, speeds, **more | changes)


class MadeRun(NamedTuple):
    """Trial rows and their plan."""

    rows: list[dict[str, Any]]
    plan: Plan


def timed_and_checked(devices: int, precision: str = "bf16", device: str = "cuda") -> MadeRun:
    """Returns a run of matrix `full` on GPUs: a timed group in half precision, and fp32 twins of a
    smaller model, launched once."""
    on = {"device": device, "devices": devices}
    timed = {**on, "precision": precision, "workload": "llama-1536x16", "regime": "weak"}
    timed |= {"global_batch": 8 * devices, "sequence_length": 512}
    checked = {**on, "workload": "llama-512x16", "global_batch": 64}
    speeds = {
        "ddp": ([100.0, 101.0, 99.0], {"wraps_ddp": "torchrun"}, []),
        "fsdp2": ([120.0, 121.0, 119.0], {"peak_memory_bytes": 50 * MIB}, []),
        "fsdp1": ([123.0, 117.0, 119.0], {}, []),
        "deepspeed": ([150.0, 151.0, 149.0], {}, ["gradients travel in fp16"]),
        "tensor": ([180.0, 181.0, 179.0], {}, []),
    }
    rows, once = [], []
    for name, (rates, more, reasons) in speeds.items():
        rows += half_rows(Cell(strategy=name, **timed), rates, *reasons, **more)
        twin = Cell(strategy=name, **checked)
        verdict = {"parity_verdict": "within tolerance", "parity_reason": "a small mistake"}
        changes: dict[str, Any] = verdict if name == "tensor" else {}
        rows += trial_rows(twin, rates[:1], oversubscribed=False, **changes)
        once.append(twin.id)
    # More twins than timed cells, as if some of these had run out of memory.
    for mib in range(1, 5):
        twin = Cell(strategy="ddp", options={"bucket_cap_mb": mib}, **checked)
        rows += trial_rows(twin, [100.0 - mib], oversubscribed=False)
        once.append(twin.id)
    plan = Plan(
        "20260101T000000-abcd", "full", (), 2, until_answered=True, not_compared=frozenset(once)
    )
    return MadeRun(rows, plan)
