"""Launches that explain a cell, and the row of what their ranks answer."""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from harness.launch.launcher import LauncherProtocol
from harness.launch.outcome import Outcome
from harness.measure.breakdown import own_seconds, straggler
from harness.measure.collectives import Call, algorithm_bytes, logical_bytes
from harness.record.profile import COMPONENTS, SPLIT
from harness.spec.cell import Cell
from harness.spec.training import Layout, States
from harness.strategy.registry import validate
from harness.worker.profile import explained_cell
from harness.workloads import Workload, make_workload, prepare_data
from harness.workloads.activations import activation_bytes
from harness.workloads.counts import model_facts


def explain_cell(
    launcher: LauncherProtocol, run_id: str, cell: Cell, attempt: int = 1, traces: str | None = None
) -> dict[str, Any]:
    """Launches a cell once more, not as a trial; returns its row.

    `traces`: folder for a trace of each rank.
    """
    workload = make_workload(cell.workload)
    strategy, layout = validate(cell, workload)
    looked_at = explained_cell(cell)
    outcome = launcher.run(
        looked_at,
        prepare_data(cell.data, workload, cell.sequence_length),
        layout.processes,
        max_restarts=strategy.max_restarts,
        command=functools.partial(strategy.command, looked_at),
        explain=True,
        traces=traces,
    )
    facts = model_facts(workload, cell.sequence_length)
    formula, theory = strategy.states(cell, layout, facts), strategy.traffic(cell, layout, facts)
    return explained_row(
        run_id,
        cell,
        attempt,
        outcome,
        theory,
        formula,
        _activations(cell, layout, workload),
        layout.servers,
    )


def _activations(cell: Cell, layout: Layout, workload: Workload) -> float | None:
    """What autograd keeps of a rank's micro-batch in fp32, by a count without memory; None where
    ranks hold parts of the model."""
    if layout.tensor > 1 or layout.pipeline > 1 or cell.precision != "fp32":
        return None
    return float(
        activation_bytes(
            workload, cell.global_batch // layout.shares // cell.micro_batches, cell.sequence_length
        )
    )


def explained_row(
    run_id: str,
    cell: Cell,
    attempt: int,
    outcome: Outcome,
    theory_bytes: float | None,
    formula: States | None,
    formula_activations: float | None,
    servers: int = 0,
) -> dict[str, Any]:
    """The row of a launch that explains a cell, whatever became of it.

    `servers`: of its ranks, the last ones, which compute little.
    """
    row: dict[str, Any] = {
        "run_id": run_id,
        "cell_id": cell.id,
        "cell_name": cell.name,
        "attempt": attempt,
        "started_at": datetime.fromtimestamp(outcome.started_at, timezone.utc),
        "status": outcome.status,
        "reason": outcome.reason,
        **{name: [] for name in _LISTS},
    }
    if outcome.status == "ok":
        row |= (
            _time_columns(outcome.answers, servers)
            | _byte_columns(outcome.answers)
            | _memory_columns(outcome.answers)
        )
        row |= {"theory_bytes": theory_bytes, "formula_activation_bytes": formula_activations}
        if formula:
            kinds = {
                "parameter": formula.parameters,
                "gradient": formula.gradients,
                "optimizer": formula.optimizer,
            }
            row |= {f"formula_{kind}_bytes": size for kind, size in kinds.items()} | {
                "formula_library_bytes": formula.library
            }
    return row


_LISTS = (
    *(f"{name}_seconds" for name in (*COMPONENTS, "overlapped", "operators", "own")),
    "logical_bytes",
    "algorithm_bytes",
    "sent_bytes",
    "peak_tracked_bytes",
    *(f"peak_{kind}_bytes" for kind in SPLIT),
    "private_bytes",
)


def _time_columns(answers: Sequence[dict[str, Any]], servers: int) -> dict[str, Any]:
    """Of the profiled step whose slowest rank's time is the median: components of one step, which
    sum to its time."""
    slowest = [
        max(rank["step"] for rank in ranks)
        for ranks in zip(*(a["profiled"] for a in answers), strict=True)
    ]
    middle = sorted(range(len(slowest)), key=lambda i: slowest[i])[len(slowest) // 2]
    steps = [a["profiled"][middle] for a in answers]
    own = [own_seconds(step) for step in steps]
    plain = [max(ranks) for ranks in zip(*(a["plain_seconds"] for a in answers), strict=True)]
    workers = answers[: len(answers) - servers]
    found = straggler(
        [
            [own_seconds(step) for step in ranks]
            for ranks in zip(*(a["profiled"] for a in workers), strict=True)
        ]
    )
    return {
        "profiled_steps": len(slowest),
        "plain_step_seconds": statistics.median(plain),
        "profiled_step_seconds": slowest[middle],
        **{
            f"{name}_seconds": [step[name] for step in steps] for name in (*COMPONENTS, "operators")
        },
        "overlapped_seconds": (
            [] if None in (overlapped := [step["overlapped"] for step in steps]) else overlapped
        ),
        "own_seconds": own,
        "straggler": found and found[0],
        "straggler_excess": found and found[1],
    }


def _byte_columns(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    sent = [a["sent_bytes_per_step"] for a in answers]
    columns: dict[str, Any] = {"sent_bytes": [] if None in sent else sent}
    if any(a["calls"] is None for a in answers):
        return columns
    calls = [[(Call(*one[:3]), float(one[3])) for one in a["calls"]] for a in answers]
    return {
        **columns,
        "collectives": json.dumps([a["calls"] for a in answers]),
        "logical_bytes": [logical_bytes(rank) for rank in calls],
        "algorithm_bytes": [
            algorithm_bytes(rank, a["wire"]) for rank, a in zip(calls, answers, strict=True)
        ],
    }


def _memory_columns(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    private = [a["private_bytes"] for a in answers]
    columns: dict[str, Any] = {"private_bytes": [] if None in private else private}
    columns["memory_reason"] = next((a["memory_reason"] for a in answers if a["memory_reason"]), "")
    splits = [a["memory"] for a in answers]
    if None in splits:
        return columns
    fullest = max(splits, key=lambda split: split["peak"])
    return {
        **columns,
        "peak_tracked_bytes": [split["peak"] for split in splits],
        **{f"peak_{kind}_bytes": [split[kind] for split in splits] for kind in SPLIT},
        "unseen_buffers": json.dumps(fullest["unseen"]),
    }
