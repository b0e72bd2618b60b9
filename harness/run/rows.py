"""A cell, its outcome and the facts of its model -> the rows that are stored.

Pure arithmetic, no clock.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from harness.analysis.flops import mfu
from harness.analysis.losses import mean_losses
from harness.analysis.stats import over_cycles, percentile, slowest, trend
from harness.host.cores import oversubscribed
from harness.host.gpu_record import as_json, use_of
from harness.launch.outcome import Outcome
from harness.measure.load import Load, foreign_load
from harness.measure.memory import imbalance
from harness.parity.verdict import ParityVerdict, as_row
from harness.record.nodes import distinct_cores, shared_machine
from harness.record.schema import VERSION
from harness.record.store import TrialKey
from harness.spec.cell import Cell
from harness.spec.training import Layout, States
from harness.workloads.counts import ModelFacts


def cell_columns(cell: Cell) -> dict[str, Any]:
    """The columns that say what was measured."""
    same = (
        "strategy workload data sequence_length devices nodes device precision regime global_batch"
        " micro_batches optimizer seed launcher threads_per_device memory_limit_bytes parity_steps"
    )
    return {
        "schema_version": VERSION,
        "cell_id": cell.id,
        "cell_name": cell.name,
        "label": cell.label,
        "cell": cell.model_dump_json(),
        "options": json.dumps(cell.options, sort_keys=True),
        "system": cell.system or None,
        "links": cell.links or None,
        **{name: getattr(cell, name) for name in same.split()},
    }


def left_out_row(run_id: str, cell: Cell, status: str, reason: str) -> dict[str, Any]:
    """A cell that was not launched: its row says why."""
    return {
        **cell_columns(cell),
        "run_id": run_id,
        "trial": 0,
        "attempt": 1,
        "position": -1,
        "status": status,
        "reason": reason,
        "expected": False,
        "log_tail": "",
        "stacks": "",
        "started_at": datetime.now(timezone.utc),
        "oversubscribed": oversubscribed(cell),
        **{name: [] for name in _LISTS},
    }


_LISTS = [
    "held_parameters",
    "parameter_dtypes",
    "gradient_dtypes",
    "optimizer_state_dtypes",
    "peak_memory_bytes_by_rank",
    "losses",
    "reference_losses",
    "parameter_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "library_bytes",
    "host_state_bytes",
    "sent_bytes_per_step",
    "node_names",
    "turn_began",
    "turn_samples_per_second",
    "rank_cores",
    "reserved_memory_bytes_by_rank",
    "nvml_memory_bytes_by_rank",
    "context_memory_bytes_by_rank",
    "host_peak_memory_bytes_by_rank",
]


def figures(
    cell: Cell,
    answers: Sequence[dict[str, Any]],
    facts: ModelFacts,
    peak_flops: float | None,
    cycle: int = 1,
) -> dict[str, Any]:
    """A finished trial's columns from its ranks' steps: throughput is the global batch over the
    slowest rank's step.

    `cycle`: steps after which the strategy's work repeats; the median step of one that averages at
    every fourth is one without.
    """
    timed = [[s for s in a["steps"] if s["phase"] == "timed"] for a in answers]
    steps = slowest([[s["step_seconds"] for s in rank] for rank in timed])
    fetches = slowest([[s["data_seconds"] for s in rank] for rank in timed])
    numbers = [s["step"] for s in timed[0]]
    typical = percentile(over_cycles(steps, numbers, cycle), 0.5)
    turns = _turns(answers[0].get("turns", ()), steps, numbers, cycle)
    flops = float(facts.flops_per_sample * cell.global_batch)
    method = answers[0]["memory_method"]
    alike = [
        a for a in answers if a["memory_method"] == method
    ]  # a server's host memory is not to be set beside GPUs'
    peaks = [a["peak_memory_bytes"] for a in alike]
    known_peaks = all(p is not None for p in peaks)
    reserved = [
        a["reserved_memory_bytes"] for a in answers if a["reserved_memory_bytes"] is not None
    ]
    return {
        "step_seconds_p50": percentile(steps, 0.5),
        "step_seconds_p95": percentile(steps, 0.95),
        "step_seconds_mean": sum(steps) / len(steps),
        "data_seconds_p50": percentile(fetches, 0.5),
        "samples_per_second": cell.global_batch / typical,
        "tokens_per_second": (
            None if cell.data == "images" else cell.global_batch * cell.sequence_length / typical
        ),
        "turn_began": [began for began, _ in turns],
        "turn_samples_per_second": [cell.global_batch / seconds for _, seconds in turns],
        "trend": trend(steps),
        "flops_per_step": flops,
        "mfu": mfu(flops, typical, cell.devices, peak_flops),
        "peak_memory_bytes": max(peaks) if known_peaks else None,
        "peak_memory_bytes_by_rank": peaks if known_peaks else [],
        "memory_imbalance": imbalance(peaks) if known_peaks else None,
        "reserved_memory_bytes": max(reserved, default=None),
        "memory_method": answers[0]["memory_method"],
        "setup_seconds": max(a["setup_seconds"] for a in answers),
        "setup_peak_memory_bytes": _largest([a.get("setup_peak_memory_bytes") for a in answers]),
        "first_step_seconds": max(a["steps"][0]["step_seconds"] for a in answers),
        "restarts": max(a["restarts"] for a in answers),
        "losses": [float("nan") if loss is None else loss for loss in mean_losses(answers)],
        "held_parameters": [a["held_parameters"] for a in answers],
        "rank_cores": [a["cores"] for a in answers if "cores" in a],
        **{name: sorted({d for a in answers for d in a[name]}) for name in _LISTS[1:4]},
        "foreign_load_cores": _foreign_load(answers),
        "energy_joules_per_sample": _per_sample(
            [a["joules_per_step"] for a in answers], cell.global_batch
        ),
        **_gpus(answers),
        **_traffic(answers),
        **_states(answers),
    }


def _gpus(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Columns of the ranks on GPUs; a server in host memory has none."""
    driving = [a for a in answers if a.get("gpu_use") is not None]
    if not driving:
        return {}
    uses = [use_of(a["gpu_use"]) for a in driving]
    return {
        "gpu_use": as_json(uses),
        "reserved_memory_bytes_by_rank": _all_known([a["reserved_memory_bytes"] for a in driving]),
        "nvml_memory_bytes_by_rank": _all_known([use.process_bytes for use in uses]),
        "context_memory_bytes_by_rank": _all_known([use.context_bytes for use in uses]),
        "host_peak_memory_bytes_by_rank": _all_known([a["host_peak_bytes"] for a in driving]),
    }


def _all_known(values: Sequence[int | None]) -> list[int]:
    """By rank; empty where one does not know."""
    known = [v for v in values if v is not None]
    return known if len(known) == len(values) else []


def _turns(
    begins: Sequence[tuple[int, float]], steps: Sequence[float], numbers: Sequence[int], cycle: int
) -> list[tuple[float, float]]:
    """When each turn began and its typical step in seconds, from the timed steps and their
    numbers."""
    found = []
    for (first, began), (end, _) in itertools.pairwise([*begins, (math.inf, 0.0)]):
        own = [i for i, number in enumerate(numbers) if first <= number < end]
        if own:
            found.append(
                (
                    began,
                    percentile(
                        over_cycles([steps[i] for i in own], [numbers[i] for i in own], cycle), 0.5
                    ),
                )
            )
    return found


def _foreign_load(answers: Sequence[dict[str, Any]]) -> float | None:
    """Of the machine where it is highest; unknown where one does not know."""
    machines = {a.get("machine") for a in answers}
    found = [
        foreign_load([Load(**a["load"]) for a in answers if a.get("machine") == machine])
        for machine in machines
    ]
    known = [load for load in found if load is not None]
    return max(known) if len(known) == len(found) else None


def _largest(values: Sequence[int | None]) -> int | None:
    """Unknown where one rank does not know."""
    known = [v for v in values if v is not None]
    return max(known) if len(known) == len(values) else None


def _per_sample(joules: Sequence[float | None], global_batch: int) -> float | None:
    """Of all ranks together; unknown where one does not know."""
    known = [j for j in joules if j is not None]
    return sum(known) / global_batch if len(known) == len(joules) else None


def _shortage(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Columns of the first rank that ran out of memory and could still say what it held."""
    short = [a for a in answers if "failed_in" in a]
    if not short:
        return {}
    first = min(short, key=lambda a: a["failed_at"])
    return {"failed_in": first["failed_in"], "failed_holding": json.dumps(first["holding"])}


def _traffic(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Columns of what was sent to other ranks and to a disk; unknown where one rank does not
    know."""
    sent = [a["sent_bytes_per_step"] for a in answers]
    columns: dict[str, Any] = {"sent_bytes_per_step": [] if None in sent else sent}
    offload = [a["offload"] for a in answers if a["offload"] is not None]
    if offload:
        for column, name in (
            ("offload_read_bytes_per_step", "read"),
            ("offload_written_bytes_per_step", "written"),
        ):
            known = [o[name] for o in offload]
            columns[column] = None if None in known else sum(known)
        columns["offload_kept_bytes"] = max(o["kept"] for o in offload)  # one folder, seen by all
    return columns


def _states(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Columns of what each rank kept between steps."""
    kept = [a["state_bytes"] for a in answers]
    fullest = max(answers, key=lambda a: a["state_bytes"]["library"])
    kinds = {
        "parameter": "parameters",
        "gradient": "gradients",
        "optimizer": "optimizer",
        "library": "library",
    }
    columns: dict[str, Any] = {
        f"{column}_bytes": [k[kind] for k in kept] for column, kind in kinds.items()
    }
    return {
        **columns,
        "host_state_bytes": [k["host"] for k in kept],
        "library_buffers": json.dumps(fullest["library_buffers"]),
    }


def trial_row(
    run_id: str,
    cell: Cell,
    key: TrialKey,
    position: int,
    layout: Layout,
    stand_in: str | None,
    outcome: Outcome,
    facts: ModelFacts,
    fingerprint: str,
    verdict: ParityVerdict | None,
    reference_losses: Sequence[float],
    peak_flops: float | None,
    bubble: float | None,
    formula: States | None = None,
    cycle: int = 1,
    **more: Any,
) -> dict[str, Any]:
    """The row of a trial that was launched, whatever became of it.

    `formula`: what a rank should keep; `more`: further columns.
    """
    row = cell_columns(cell) | {name: [] for name in _LISTS}
    if outcome.nodes:
        row |= {
            "node_names": [node["name"] for node in outcome.nodes],
            "node_facts": json.dumps(outcome.nodes),
            **outcome.link,
        }
    row |= {
        "run_id": run_id,
        "trial": key.trial,
        "attempt": key.attempt,
        "position": position,
        "status": outcome.status,
        "reason": outcome.reason,
        "expected": False,
        "log_tail": outcome.log_tail,
        "stacks": outcome.stacks,
        "started_at": datetime.fromtimestamp(outcome.started_at, timezone.utc),
        "wall_seconds": outcome.wall_seconds,
        "startup_seconds": outcome.startup_seconds,
        "data_fingerprint": fingerprint,
        "processes": layout.processes,
        "data_parallel": layout.data,
        "pipeline_parallel": layout.pipeline,
        "tensor_parallel": layout.tensor,
        "stand_in": stand_in or shared_machine(outcome.nodes, outcome.link.get("link_emulation")),
        "oversubscribed": oversubscribed(
            cell, layout.processes, distinct_cores(outcome.nodes) if outcome.nodes else None
        ),
        "launcher": outcome.launcher,
        "parameters": facts.parameters,
        "trained_parameters": sum(facts.sizes),
        "reference_losses": list(reference_losses),
        **more,
    }
    if formula is not None:
        row |= {
            "formula_parameter_bytes": formula.parameters,
            "formula_gradient_bytes": formula.gradients,
            "formula_optimizer_bytes": formula.optimizer,
            "formula_library_bytes": formula.library,
            "formula_transient_bytes": formula.transient,
        }
    if outcome.status == "out_of_memory":
        row |= _shortage(outcome.answers)
    if outcome.status != "ok" or verdict is None:
        return row
    row |= (
        figures(cell, outcome.answers, facts, peak_flops, cycle)
        | as_row(verdict)
        | {"bubble_fraction": bubble}
    )
    if verdict.verdict == "unknown":
        row["reason"] = f"not verified, so not ranked: {verdict.reason}"
    if verdict.verdict == "diverged":
        row |= {
            "status": "diverged",
            "reason": verdict.reason,
            "expected": cell.expect == "diverged",
        }
    return row


def step_rows(
    run_id: str, key: TrialKey, answers: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Every step of every rank."""
    same = {"run_id": run_id, "cell_id": key.cell_id, "trial": key.trial, "attempt": key.attempt}
    return [{**same, "rank": a["rank"], **step} for a in answers for step in a.get("steps", [])]
