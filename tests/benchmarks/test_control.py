"""What the control between the steps does to the step after it, and whether work can hide in it."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from harness.analysis.stats import slowest
from harness.launch.launcher import Launcher
from harness.run.figures import WINDOW_STEPS
from harness.spec.cell import Cell
from harness.strategy.registry import validate
from harness.worker.answer import TrainedAnswer
from harness.workloads import make_workload, prepare_data
from tests.benchmarks.conftest import Ratio

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "6"))
TIMED_SECONDS = 3.0
STRATEGIES: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single", "devices": 1, "global_batch": 2},
    "ddp": {"strategy": "ddp"},
    "fsdp1": {"strategy": "fsdp1"},
    "fsdp2": {"strategy": "fsdp2"},
    "zero2": {"strategy": "deepspeed", "options": {"stage": 2}},
    "tensor": {"strategy": "tensor"},
    "pipeline": {"strategy": "pipeline", "micro_batches": 2, "options": {"schedule": "1f1b"}},
    "horovod": {"strategy": "horovod"},
    "accelerate": {"strategy": "accelerate"},
}


def trained(launcher: Launcher, **axes: Any) -> Sequence[TrainedAnswer]:
    """A launch with a control, which runs after every second step: two samples for each rank."""
    defaults = {"devices": 2, "workload": "llama-mini", "global_batch": 4, "sequence_length": 64}
    cell = Cell(**{**defaults, "warmup_steps": 3, "parity_steps": 3, "timed_steps": 8, **axes})
    workload = make_workload(cell.workload)
    outcome = launcher.run(
        cell,
        prepare_data(cell.data, workload, cell.sequence_length),
        validate(cell, workload)[1].processes,
        control=True,
        timed_seconds=TIMED_SECONDS,
    )
    assert outcome.status == "ok", outcome.reason
    return outcome.trained


def after_a_pause(ranks: Sequence[TrainedAnswer]) -> float:
    """Geometric mean over a launch of a step after a pause over the steps before and after it,
    which follow none."""
    seconds = slowest([[step.step_seconds for step in rank.steps] for rank in ranks])
    steps = ranks[0].steps
    logs = [
        math.log(seconds[i]) - (math.log(seconds[i - 1]) + math.log(seconds[i + 1])) / 2
        for i in range(1, len(steps) - 1)
        if all(step.phase == "timed" for step in steps[i - 1 : i + 2])
        and steps[i - 1].control_seconds is not None
        and steps[i].control_seconds is None
    ]
    return math.exp(statistics.fmean(logs))


def adjusted_seconds(ranks: Sequence[TrainedAnswer]) -> float:
    """Mean timed step over the mean time of the control."""
    timed = [[step for step in rank.steps if step.phase == "timed"] for rank in ranks]
    assert len(timed[0]) >= WINDOW_STEPS
    steps = slowest([[step.step_seconds for step in rank] for rank in timed])
    controls = [
        step.control_seconds for rank in timed for step in rank if step.control_seconds is not None
    ]
    return statistics.fmean(steps) / statistics.fmean(controls)


@pytest.mark.benchmark(group="control: the step after a pause over those that follow none")
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.timeout(120 + 60 * ROUNDS)
def test_the_step_after_a_pause(
    benchmark: BenchmarkFixture, ratio: Ratio, launcher: Launcher, name: str
) -> None:
    found: list[float] = []
    benchmark.pedantic(
        lambda: found.append(after_a_pause(trained(launcher, **STRATEGIES[name]))), rounds=ROUNDS
    )
    ratio(f"step after a pause over others: {name}", found, "within 3 % of the others'")


@pytest.mark.benchmark(group="control: a tenth of the work in a thread after the step")
@pytest.mark.timeout(120 + 180 * ROUNDS)
def test_hidden_work_counts(benchmark: BenchmarkFixture, ratio: Ratio, launcher: Launcher) -> None:
    """Adjusted step time of a strategy that leaves a tenth of its work to a thread, over that
    without this work."""
    step = statistics.median(
        step.step_seconds for step in trained(launcher, strategy="hidden")[0].steps
    )
    hidden = {"milliseconds": 100 * step, "in_thread": True}
    found: list[float] = []

    def both() -> None:
        plain = adjusted_seconds(trained(launcher, strategy="hidden"))
        more = adjusted_seconds(trained(launcher, strategy="hidden", options=hidden))
        found.append(more / plain)

    benchmark.pedantic(both, rounds=2 * ROUNDS)
    ratio("with a tenth of the work hidden over without it", found, "at least 1.08")
