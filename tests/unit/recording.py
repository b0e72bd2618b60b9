"""Builders of good records and of skipped cells, in which tests override some fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.cell.cell import Cell
from harness.host.cores import oversubscribed
from harness.measure.resource_use import CpuTime
from harness.record.run_record import RankStep
from harness.record.trial import TrialRecord
from harness.run.metrics import Peaks, left_out_record, with_metrics
from harness.worker.rank_answer import RankAnswer, RankStates, TrainedAnswer
from harness.workloads.counts import ModelFacts


def left_out_fields(run_id: str, cell: Cell, status: str, reason: str) -> dict[str, Any]:
    """Returns a skipped cell's values by column, as on two cores."""
    crowded = oversubscribed(cell, 2 * cell.nodes)
    return dict(vars(left_out_record(run_id, cell, status, reason)), oversubscribed=crowded)


def figures(
    cell: Cell,
    answers: Sequence[RankAnswer],
    facts: ModelFacts,
    peak_flops: float | None,
    cycle: int = 1,
) -> TrialRecord:
    """Returns the record of a trial with these answers from its ranks."""
    trial = left_out_record("run-1", cell, "ok", "")
    return with_metrics(trial, cell, answers, facts, Peaks(peak_flops), cycle)


def answer(
    rank: int, step_seconds: list[float], losses: list[float | None] | None = None, **more: Any
) -> RankAnswer:
    """Returns a rank's answer, with a warm-up step of 9 s that no metric may count."""
    times = [9.0, *step_seconds]
    phases = ["warmup"] + ["timed"] * len(step_seconds)
    values = losses or [1.0] * len(times)
    steps = [
        RankStep(data_seconds=t / 10, step_seconds=t, step=i, phase=p, loss=x)
        for i, (p, t, x) in enumerate(zip(phases, times, values, strict=True))
    ]
    good = TrainedAnswer(
        setup_seconds=1.0 + rank,
        setup_peak_memory_bytes=None,
        restarts=0,
        cores="0-1",
        steps=tuple(steps),
        time_slices=(),
        peak_memory_bytes=100 * (rank + 1),
        reserved_memory_bytes=None,
        host_peak_bytes=None,
        memory_method="by hand",
        gpu_use=None,
        deviations=None,
        replayed_deviations=(),
        replays_ahead=(),
        busy_fraction=None,
        offload=None,
        sent_bytes_per_step=20.0,
        cpu_time=CpuTime(seconds=2.0, rank_seconds=1.5, busy=3.5),
        joules_per_step=4.0,
        states=RankStates(
            parameter_dtypes=("float32",),
            gradient_dtypes=("float32",),
            optimizer_state_dtypes=("float32",),
            held_parameters=5,
            state_bytes={
                "parameters": 20,
                "gradients": 0,
                "optimizer": 40,
                "library": 20,
                "host": 0,
            },
            library_buffers={"buckets": 20},
        ),
    )
    return RankAnswer(rank, trained=replace(good, **more))
