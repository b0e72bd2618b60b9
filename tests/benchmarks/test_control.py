"""What the control between the steps does to the step after it, and whether work can hide in it."""

from __future__ import annotations

import math
import os
import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from harness.launch.launcher import Launcher
from harness.run.metrics import WINDOW_STEPS, timed_seconds
from harness.spec.cell import Cell
from harness.strategy.registry import validate
from harness.worker.rank_answer import TrainedAnswer
from harness.workloads import make_workload, prepare_data
from tests.benchmarks.conftest import Ratio

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "6"))
TIMED_SECONDS = 4.0
BASELINE = "ddp"
BASELINE_LAUNCHES = 8
"""Of the baseline in each round: every ratio has its noise."""
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
    "horovod by mpirun": {"strategy": "horovod", "options": {"controller": "mpi"}},
    "accelerate launch": {"strategy": "accelerate", "options": {"config_file": True}},
}


def trained(
    launcher: Launcher, steps_per_pause: int = 2, /, **axes: Any
) -> Sequence[TrainedAnswer]:
    """A launch of a cell such as `full` has on CPUs, with a control."""
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
    """Geometric mean over a launch with a pause after every fourth step of two steps after a pause,
    as throughput counts those of `full`, over the two before the pause and the two that follow
    them, which come after no pause.

    After a pause all ranks begin together, and the two have ended when the last rank has. Of the
    others some time is waiting for ranks that began later, which is in the time of their step
    before too; their mean over the ranks has it once.
    """
    steps = ranks[0].steps

    def pairs(first: int) -> list[float]:
        """Each rank's time of two steps in a row, the first by its number."""
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
    """Mean time of the control in the pauses after timed steps."""
    timed = [step for rank in ranks for step in rank.steps if step.phase == "timed"]
    known = [step.control_seconds for step in timed if step.control_seconds is not None]
    return statistics.fmean(known)


def adjusted_seconds(ranks: Sequence[TrainedAnswer]) -> float:
    """Mean timed step over the mean time of the control."""
    assert sum(step.phase == "timed" for step in ranks[0].steps) >= WINDOW_STEPS
    steps = timed_seconds([rank.steps for rank in ranks])
    return statistics.fmean(steps) / control_seconds(ranks)


@pytest.mark.benchmark(group="control: ratios between strategies with it over those without it")
@pytest.mark.timeout(0)
def test_ratios_between_strategies(
    benchmark: BenchmarkFixture, ratio: Ratio, launcher: Launcher
) -> None:
    """A pause after every fourth step. In each round every strategy is launched once, in an order
    of its own, and the baseline several times; what the pause does to a strategy's two steps is
    divided by what it does to the baseline's, which is what it does to the ratio of the two in
    `full`, where there is a pause after every second step. The control's own time, by which figures
    are adjusted, is compared in the same way."""
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
        (f"control's own time over that beside {BASELINE}", levels),
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
def test_hidden_work_counts(benchmark: BenchmarkFixture, ratio: Ratio, launcher: Launcher) -> None:
    """Adjusted step time of a strategy that leaves a tenth of its work to a thread, over that
    without this work; a tenth of what a step takes just before, as the machine's speed changes."""
    found: list[float] = []

    def both() -> None:
        plain = trained(launcher, strategy="hidden")
        step = statistics.median(step.step_seconds for step in plain[0].steps)
        hidden = {"milliseconds": 100 * step, "in_thread": True}
        more = trained(launcher, strategy="hidden", options=hidden)
        found.append(adjusted_seconds(more) / adjusted_seconds(plain))

    benchmark.pedantic(both, rounds=2 * ROUNDS)
    ratio("with a tenth of the work hidden over without it", found, "at least 1.08")
