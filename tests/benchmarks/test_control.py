"""Effect of the control on the step after it, and whether work can hide in the control."""

from __future__ import annotations

import math
import os
import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from harness.cell.cell import Cell
from harness.launch.launcher import Launcher
from harness.run.metrics import WINDOW_STEPS, timed_seconds
from harness.seam.registry import validate
from harness.worker.rank_answer import TrainedAnswer
from harness.workloads import make_workload, prepare_data
from tests.benchmarks.conftest import Ratio

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "6"))
TIMED_SECONDS = 4.0
BASELINE = "ddp"
BASELINE_LAUNCHES = 8
"""Baseline launches in each round; the baseline's noise is in every ratio."""
STRATEGIES: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single", "devices": 1},
    "ddp": {"strategy": "ddp"},
    "fsdp1": {"strategy": "fsdp1"},
    "fsdp2": {"strategy": "fsdp2"},
    "zero2": {"strategy": "deepspeed", "options": {"stage": 2}},
    "tensor": {"strategy": "tensor"},
    "pipeline": {"strategy": "pipeline", "micro_batches": 2, "options": {"schedule": "1f1b"}},
    "horovod": {"strategy": "horovod"},
    "accelerate": {"strategy": "accelerate"},
    "ddp by spawn": {"strategy": "ddp", "launcher": "spawn"},
    "horovod by mpirun": {
        "strategy": "horovod",
        "options": {"controller": "mpi", "mpi_yield_when_idle": True},
    },
    "accelerate launch": {"strategy": "accelerate", "options": {"config_file": True}},
}


def trained(
    launcher: Launcher, steps_per_pause: int = 2, /, **axes: Any
) -> Sequence[TrainedAnswer]:
    """Launches a cell like those of `full` on CPUs, with a control."""
    defaults = {"devices": 2, "workload": "llama-mini", "global_batch": 8, "sequence_length": 64}
    cell = Cell(**{**defaults, "warmup_steps": 3, "parity_steps": 3, "timed_steps": 8, **axes})
    workload = make_workload(cell.workload)
    outcome = launcher.run(
        cell,
        prepare_data(cell.data, workload, cell.sequence_length),
        validate(cell, workload)[1].processes,
        samples_per_control=steps_per_pause * cell.global_batch // cell.devices,
        timed_seconds=TIMED_SECONDS,
    )
    assert outcome.status == "ok", outcome.reason
    return outcome.trained


def after_a_pause(ranks: Sequence[TrainedAnswer]) -> float:
    """Returns the time of the two steps after a pause over that of two other steps.

    The launch pauses after every fourth step. The others are the two steps before the pause and
    the next two; the result is a geometric mean.

    All ranks start together after a pause, so its two steps last until the slowest rank ends, as in
    the throughput of `full`. In other steps, a rank may wait for ranks that started later. Their
    previous step includes that time too, but the mean over ranks counts it once.
    """
    steps = ranks[0].steps

    def pairs(first: int) -> list[float]:
        """Returns each rank's time for two consecutive steps; `first` is a step number."""
        return [sum(step.step_seconds for step in rank.steps[first : first + 2]) for rank in ranks]

    logs = [
        math.log(max(pairs(i)))
        - statistics.fmean(math.log(statistics.fmean(pairs(other))) for other in (i - 2, i + 2))
        for i in range(2, len(steps) - 3)
        if all(step.phase == "timed" for step in steps[i - 2 : i + 4])
        and [step.control_seconds is not None for step in steps[i - 2 : i + 3]]
        == [False, True, False, False, False]
    ]
    return math.exp(statistics.fmean(logs))


def control_seconds(ranks: Sequence[TrainedAnswer]) -> float:
    """Returns the mean time of the control in the pauses after timed steps, in seconds."""
    timed = [step for rank in ranks for step in rank.steps if step.phase == "timed"]
    controls = [step.control_seconds for step in timed if step.control_seconds is not None]
    return statistics.fmean(controls)


def adjusted_seconds(ranks: Sequence[TrainedAnswer]) -> float:
    """Returns the mean timed step divided by the mean time of the control."""
    assert sum(step.phase == "timed" for step in ranks[0].steps) >= WINDOW_STEPS
    steps = timed_seconds([rank.steps for rank in ranks])
    return statistics.fmean(steps) / control_seconds(ranks)


@pytest.mark.benchmark(group="control: ratios between strategies with it over those without it")
@pytest.mark.timeout(0)
def test_ratios_between_strategies(
    benchmark: BenchmarkFixture, ratio: Ratio, launcher: Launcher
) -> None:
    """Measures how the control changes ratios between strategies.

    Each round launches every strategy once and the baseline several times, in random order. A
    pause's effect on a strategy's two steps is divided by its effect on the baseline's. The result
    applies to `full`, which pauses after every second step. The control's time, which adjusts
    figures, is compared in the same way.
    """
    effects: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    levels: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    order = random.Random(0)

    def one_round() -> None:
        of_round = [*STRATEGIES, *[BASELINE] * (BASELINE_LAUNCHES - 1)]
        order.shuffle(of_round)
        found: dict[str, list[float]] = {name: [] for name in STRATEGIES}
        took: dict[str, list[float]] = {name: [] for name in STRATEGIES}
        for name in of_round:
            ranks = trained(launcher, 4, **STRATEGIES[name])
            found[name].append(math.log(after_a_pause(ranks)))
            took[name].append(math.log(control_seconds(ranks)))
        for name in STRATEGIES:
            effects[name].append(statistics.fmean(found[name]))
            levels[name].append(statistics.fmean(took[name]))

    benchmark.pedantic(one_round, rounds=ROUNDS)
    others = [name for name in STRATEGIES if name != BASELINE]
    for what, logs in (
        (f"ratio to {BASELINE} with the control over without it", effects),
        (f"control's time over that during {BASELINE}", levels),
    ):
        for name in others:
            pairs = zip(logs[name], logs[BASELINE], strict=True)
            ratio(f"{what}: {name}", [math.exp(one - base) for one, base in pairs], "0.97 to 1.03")
        pooled = [
            math.exp(statistics.fmean(logs[name][i] for name in others) - logs[BASELINE][i])
            for i in range(ROUNDS)
        ]
        ratio(f"{what}: pooled", pooled, "0.99 to 1.01")
    steps = [
        math.exp(statistics.fmean(effects[name][i] for name in STRATEGIES)) for i in range(ROUNDS)
    ]
    ratio("two steps after a pause over others: all strategies", steps, "no claim")


@pytest.mark.benchmark(group="control: a tenth of the work in a thread after the step")
@pytest.mark.timeout(120 + 180 * ROUNDS)
def test_work_left_after_a_step_counts(
    benchmark: BenchmarkFixture, ratio: Ratio, launcher: Launcher
) -> None:
    """Work that a strategy leaves to a thread still counts in the adjusted step time.

    It is a tenth of the step measured just before, as the machine's speed changes.
    """
    found: list[float] = []

    def both() -> None:
        plain = trained(launcher, strategy="hidden")
        step = statistics.median(step.step_seconds for step in plain[0].steps)
        hidden = {"milliseconds": 100 * step, "in_thread": True}
        more = trained(launcher, strategy="hidden", options=hidden)
        found.append(adjusted_seconds(more) / adjusted_seconds(plain))

    benchmark.pedantic(both, rounds=2 * ROUNDS)
    ratio("with a tenth of the work hidden over without it", found, "at least 1.08")
