"""How often a comparison is right on this machine: a cell against itself, and against one that is
slower by a known percentage.

Each round launches the cells in random order. A comparison takes as many consecutive rounds as a
run has trials, and shares none with another comparison. BENCH_COMPARISONS sets their number (20; a
precision halves it, but doubles their length). Half of a cell's comparisons with itself run next to
a busy neighbour, which computes on one core for some of the rounds.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.matrix import DEFAULT_TRIALS
from harness.analysis.stats import (
    CONFIDENCE,
    PAIR_CONFIDENCE,
    Comparison,
    SliceRates,
    compare_rounds,
)
from harness.launch.interleaved import InterleavedLauncher, Launch
from harness.launch.launcher import Launcher
from harness.spec.cell import Cell
from harness.strategy.registry import validate
from harness.workloads import make_workload, prepare_data
from harness.workloads.counts import model_facts
from tests.benchmarks.conftest import Ratio, step_seconds
from tests.unit.recording import figures

COMPARISONS = int(os.environ.get("BENCH_COMPARISONS", "20"))
SLOWER = {"one": 0.0, "same": 0.0, "slower by 3 %": 3.0, "slower by 1.5 %": 1.5}
Round = dict[str, tuple[float, SliceRates]]
"""Samples per second of each cell, overall and in each turn."""
Take = Callable[[Sequence[str]], Round]


def cell_of(name: str, devices: int, timed_steps: int) -> Cell:
    axes = {
        "devices": devices,
        "workload": "llama-nano",
        "global_batch": 8,
        "sequence_length": 64,
        "warmup_steps": 3,
    }
    return Cell(
        strategy="slowed",
        options={"percent": SLOWER[name]},
        parity_steps=3,
        timed_steps=timed_steps,
        **axes,
    )  # type: ignore[arg-type]


def alone(launcher: Launcher) -> Take:
    """One launch after the other, as runs do by default: DDP on two ranks, 10 steps."""
    return lambda names: {
        name: (8 / step_seconds(launcher, cell_of(name, 2, 10)), ()) for name in names
    }


def interleaved_trials(interleaved: InterleavedLauncher) -> Take:
    """All launches at once, interleaved: one rank, 60 steps."""
    workload = make_workload("llama-nano")
    facts = model_facts(workload, 64)

    def take(names: Sequence[str]) -> Round:
        cells = [cell_of(name, 1, 60) for name in names]
        launches = [
            Launch(one, prepare_data(one.data, workload, 64), validate(one, workload)[1].processes)
            for one in cells
        ]
        found = {}
        for name, one, outcome in zip(names, cells, interleaved.together(launches), strict=True):
            assert outcome.status == "ok", outcome.reason
            row = figures(one, outcome.answers, facts, None)
            turns = list(zip(row.turn_began, row.turn_samples_per_second, strict=True))
            found[name] = (row.samples_per_second, turns)
        return found

    return take


@pytest.fixture(scope="module")
def interleaved(plugin: object) -> Iterator[InterleavedLauncher]:
    with contextlib.closing(InterleavedLauncher(["bench_plugin"], 2)) as found:
        yield found


def rounds(
    take: Take, names: Sequence[str], count: int, busy: bool, rng: random.Random
) -> list[Round]:
    """Runs rounds. `busy`: a neighbour computes on one core during some of them."""
    found = []
    from_round, to_round = sorted(rng.sample(range(count + 1), 2)) if busy else (0, 0)
    neighbour: subprocess.Popen[bytes] | None = None
    try:
        for number in range(count):
            if busy and number == from_round:
                neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            if neighbour and number == to_round:
                neighbour.kill()
                neighbour.wait()
                neighbour = None
            found.append(take(rng.sample(names, len(names))))
    finally:
        if neighbour:
            neighbour.kill()
            neighbour.wait()
    return found


def compared(taken: Sequence[Round], name: str, confidence: float = PAIR_CONFIDENCE) -> Comparison:
    speeds, turns = (
        [{i: one[which][what] for i, one in enumerate(taken)} for which in (name, "one")]
        for what in (0, 1)
    )
    found = compare_rounds(*speeds, (turns[0], turns[1]), confidence)  # type: ignore[arg-type]
    assert found is not None
    return found


def default_trials(
    take: Take, benchmark: BenchmarkFixture, ratio: Ratio, how: str, wanted: str
) -> None:
    """Counts false alarms of a cell against itself, and how often a 3 % difference is found, with
    the default number of trials."""
    rng, alarms, seen, ones = random.Random(1), [], [], []
    take(["one", "same"])

    def compare() -> None:
        taken = rounds(take, ["one", "same"], DEFAULT_TRIALS, len(alarms) % 2 == 1, rng)
        alarms.append(compared(taken, "same").verdict != "no difference seen")
        taken = rounds(take, ["one", "slower by 3 %"], DEFAULT_TRIALS, False, rng)
        seen.append(compared(taken, "slower by 3 %").verdict == "slower")
        ones.extend(one["one"][0] for one in taken)

    benchmark.pedantic(compare, rounds=COMPARISONS)
    spread = statistics.stdev(ones) / statistics.fmean(ones)
    ratio(
        f"spread of {len(ones)} launches of one cell, {how}, standard deviation over mean",
        [spread],
        "",
    )
    ratio(
        f"A/A alarms in {len(alarms)} comparisons of {DEFAULT_TRIALS} trials, {how}, share",
        [sum(alarms) / len(alarms)],
        "at most 0.01",
    )
    ratio(
        f"A/B of 3 %, {how}, seen in {len(seen)} comparisons, share",
        [sum(seen) / len(seen)],
        wanted,
    )


@pytest.mark.timeout(120 + 60 * COMPARISONS)
@pytest.mark.benchmark(group="verdicts: all rounds of all comparisons")
def test_default_trials(benchmark: BenchmarkFixture, ratio: Ratio, launcher: Launcher) -> None:
    default_trials(alone(launcher), benchmark, ratio, "one after the other", "")


@pytest.mark.timeout(120 + 120 * COMPARISONS)
@pytest.mark.benchmark(group="verdicts: all rounds of all comparisons")
def test_default_trials_interleaved(
    benchmark: BenchmarkFixture, ratio: Ratio, interleaved: InterleavedLauncher
) -> None:
    default_trials(
        interleaved_trials(interleaved), benchmark, ratio, "interleaved", "at least 0.95"
    )


@pytest.mark.timeout(600 + 60 * COMPARISONS)
@pytest.mark.benchmark(group="verdicts: all rounds of all comparisons")
def test_half_a_percent(
    benchmark: BenchmarkFixture, ratio: Ratio, interleaved: InterleavedLauncher
) -> None:
    """Counts how often --interleave --precision 0.5% finds 1.5 %, and the trials it takes."""
    rng, seen, trials = random.Random(2), [], []
    take = interleaved_trials(interleaved)
    take(["one"])

    def compare() -> None:
        names = ["one", "slower by 1.5 %"]
        taken = rounds(take, names, DEFAULT_TRIALS, False, rng)
        while (compared(taken, names[1], CONFIDENCE).precision or 0.0) > 0.005:
            taken += rounds(take, names, 1, False, rng)
        seen.append(compared(taken, names[1]).verdict == "slower")
        trials.append(float(len(taken)))

    benchmark.pedantic(compare, rounds=max(1, COMPARISONS // 2))
    ratio(
        f"A/B of 1.5 % at --precision 0.5%, interleaved, seen in {len(seen)} comparisons, share",
        [sum(seen) / len(seen)],
        "at least 0.95",
    )
    ratio("trials that --precision 0.5% took", trials, "")
