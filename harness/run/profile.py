from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, TypeAlias

from harness.cell.cell import Cell
from harness.launch.launcher import LauncherProtocol
from harness.launch.outcome import Outcome
from harness.measure.rank_traffic import Call, algorithm_bytes, logical_bytes
from harness.measure.step_breakdown import own_seconds, straggler
from harness.record.plan import KINDS
from harness.record.profile_record import COMPONENTS, GPU_PARTS, ProfileRecord
from harness.run.metrics import all_known
from harness.seam.registry import own_command, validate
from harness.worker.rank_answer import ProfiledAnswer
from harness.worker.rank_profile import profiled_cell
from harness.workloads import make_workload, prepare_data
from harness.workloads.counts import model_facts

Fields: TypeAlias = dict[str, Any]


def profile_cell(
    launcher: LauncherProtocol, run_id: str, cell: Cell, attempt: int = 1, traces: str | None = None
) -> ProfileRecord:
    """Profiles a cell's ranks outside its trials. `traces`: folder for their traces."""
    workload = make_workload(cell.workload)
    strategy, layout = validate(cell, workload)
    with_few_steps = profiled_cell(cell)
    outcome = launcher.run(
        with_few_steps,
        prepare_data(cell.data, workload, cell.sequence_length),
        layout.processes,
        max_restarts=strategy.capabilities.max_restarts,
        command=own_command(strategy, with_few_steps),
        profile=True,
        traces=traces,
    )
    record = profile_record(run_id, cell, attempt, outcome, layout.servers)
    if outcome.status != "ok":
        return record
    facts = model_facts(workload, cell.sequence_length)
    record = replace(
        record,
        theory_bytes=strategy.traffic(cell, layout, facts),
        formula_activation_bytes=strategy.activation_bytes(cell, layout, workload)
        if cell.precision == "fp32"
        else None,
    )
    if (states := strategy.states(cell, layout, facts)) is None:
        return record
    return replace(
        record,
        formula_parameter_bytes=states.parameters,
        formula_gradient_bytes=states.gradients,
        formula_optimizer_bytes=states.optimizer,
        formula_library_bytes=states.library,
    )


def profile_record(
    run_id: str,
    cell: Cell,
    attempt: int,
    outcome: Outcome,
    servers: int = 0,
) -> ProfileRecord:
    """Returns a profile's record without formulas, however it ended.

    `servers`: number of parameter servers, the last ranks.
    """
    record = ProfileRecord(
        run_id=run_id,
        cell_id=cell.id,
        cell_name=cell.name,
        attempt=attempt,
        started_at=datetime.fromtimestamp(outcome.started_at, timezone.utc),
        status=outcome.status,
        reason=outcome.reason,
    )
    if outcome.status != "ok":
        return record
    ranks = [answer.profiled for answer in outcome.answers if answer.profiled]
    return _with_memory(_with_bytes(_with_times(record, ranks, servers), ranks), ranks)


def _with_times(
    record: ProfileRecord, ranks: Sequence[ProfiledAnswer], servers: int
) -> ProfileRecord:
    """Adds the components of the median step, by the time of its slowest rank."""
    profiled = [[_without_unknown(step) for step in rank.profiled] for rank in ranks]
    slowest = [max(step["step"] for step in steps) for steps in zip(*profiled, strict=True)]
    middle = sorted(range(len(slowest)), key=lambda i: slowest[i])[len(slowest) // 2]
    steps = [rank[middle] for rank in profiled]
    plain = [max(seconds) for seconds in zip(*(r.plain_seconds for r in ranks), strict=True)]
    workers = profiled[: len(ranks) - servers]
    late = straggler(
        [[own_seconds(step) for step in steps] for steps in zip(*workers, strict=True)]
    )

    return replace(
        record,
        profiled_steps=len(slowest),
        plain_step_seconds=statistics.median(plain),
        profiled_step_seconds=slowest[middle],
        overlapped_seconds=all_known([rank.profiled[middle]["overlapped"] for rank in ranks]),
        own_seconds=tuple(own_seconds(step) for step in steps),
        straggler=late and late[0],
        straggler_excess=late and late[1],
        **_by_part(steps),
    )


def _by_part(steps: Sequence[Mapping[str, float]]) -> Fields:
    """Returns fields of the record: each rank's seconds in each part of a step."""
    names = (*COMPONENTS, "operators", *(f"gpu_{part}" for part in GPU_PARTS))
    return {f"{name}_seconds": tuple(s[name] for s in steps if name in s) for name in names}


def _without_unknown(step: Mapping[str, float | None]) -> dict[str, float]:
    return {name: seconds for name, seconds in step.items() if seconds is not None}


def _with_bytes(record: ProfileRecord, ranks: Sequence[ProfiledAnswer]) -> ProfileRecord:
    record = replace(record, sent_bytes=all_known([rank.sent_bytes_per_step for rank in ranks]))
    counts = [rank.calls for rank in ranks if rank.calls is not None]
    if len(counts) < len(ranks):
        return record
    calls = [
        [(Call(operation, size, group), float(count)) for operation, size, group, count in rank]
        for rank in counts
    ]
    sent = [algorithm_bytes(rank_calls, r.wire) for rank_calls, r in zip(calls, ranks, strict=True)]
    return replace(
        record,
        collectives=json.dumps(counts),
        logical_bytes=tuple(logical_bytes(rank_calls) for rank_calls in calls),
        algorithm_bytes=tuple(sent),
    )


def _with_memory(record: ProfileRecord, ranks: Sequence[ProfiledAnswer]) -> ProfileRecord:
    record = replace(
        record,
        private_bytes=all_known([rank.private_bytes for rank in ranks]),
        memory_reason=next((r.memory_reason for r in ranks if r.memory_reason), ""),
    )
    peaks = [rank.memory for rank in ranks if rank.memory is not None]
    if len(peaks) < len(ranks):
        return record

    kinds = (*KINDS, "activations", "other")
    held: Fields = {f"peak_{k}_bytes": tuple(peak[k] for peak in peaks) for k in kinds}
    fullest = max(ranks, key=lambda rank: rank.memory["peak"] if rank.memory else 0)
    return replace(
        record,
        unseen_buffers=json.dumps(fullest.unseen_buffers),
        peak_tracked_bytes=tuple(peak["peak"] for peak in peaks),
        **held,
    )
