"""How often a comparison is right on this machine: a cell against itself, and against one that is slower by a known share.

One run takes rounds of four cells, shuffled, the two equal ones, one slowed by 3 % and one by 1.5 %. Rounds in a row make a
comparison, which shares none of them with another. BENCH_COMPARISONS sets how many (20), half of them beside a busy neighbour that
computes on one core for some rounds of each.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.matrix import DEFAULT_TRIALS
from harness.cell import Cell
from harness.launch import Launcher
from harness.stats import LEAST_TRIALS, compare_rounds, estimate
from tests.benchmarks.conftest import Ratio, step_seconds

COMPARISONS = int(os.environ.get("BENCH_COMPARISONS", "20"))


def cell_of(percent: float) -> Cell:
    axes = {"devices": 2, "workload": "llama-nano", "global_batch": 8, "sequence_length": 64, "warmup_steps": 3, "timed_steps": 10}
    return Cell(strategy="slowed", options={"percent": percent}, parity_steps=3, **axes)  # type: ignore[arg-type]


CELLS = {"one": cell_of(0), "same": cell_of(0), "slower by 3 %": cell_of(3), "slower by 1.5 %": cell_of(1.5)}


def rounds(launcher: Launcher, names: Sequence[str], count: int, busy: bool, rng: random.Random) -> list[dict[str, float]]:
    """Steps per second of each cell in each round; `busy`: beside a neighbour that computes on one core for part of the rounds."""
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
            order = rng.sample(names, len(names))
            taken = {name: 1 / step_seconds(launcher, CELLS[name]) for name in order}
            found.append(taken)
    finally:
        if neighbour:
            neighbour.kill()
            neighbour.wait()
    return found


def verdict(taken: Sequence[dict[str, float]], first: str, second: str = "one") -> str:
    compared = compare_rounds(*({i: one[name] for i, one in enumerate(taken)} for name in (first, second)))
    assert compared is not None
    return compared.verdict


@pytest.mark.timeout(120 + 60 * COMPARISONS)
@pytest.mark.benchmark(group="verdicts: all rounds of all comparisons")
def test_default_trials(benchmark: BenchmarkFixture, ratio: Ratio, launcher: Launcher) -> None:
    """False alarms of a cell against itself, and how often 3 % are seen, with the default number of trials."""
    rng, alarms, seen, ones = random.Random(1), [], [], []
    step_seconds(launcher, CELLS["one"])

    def compare() -> None:
        busy = len(alarms) % 2 == 1
        taken = rounds(launcher, ["one", "same", *(["slower by 3 %"] if not busy else [])], DEFAULT_TRIALS, busy, rng)
        alarms.append(verdict(taken, "same") != "no difference seen")
        if not busy:
            ones.extend(one["one"] for one in taken)
            seen.append(verdict(taken, "slower by 3 %") == "slower")

    benchmark.pedantic(compare, rounds=COMPARISONS)
    spread = statistics.stdev(ones) / statistics.fmean(ones)
    ratio(f"spread of {len(ones)} launches of one cell, standard deviation over mean", [spread], "")
    ratio(f"A/A alarms in {len(alarms)} comparisons of {DEFAULT_TRIALS} trials, share", [sum(alarms) / len(alarms)], "at most 0.01")
    ratio(f"A/B of 3 %, seen in {len(seen)} comparisons, share", [sum(seen) / len(seen)], "at least 0.95")


@pytest.mark.timeout(600 + 60 * COMPARISONS)
@pytest.mark.benchmark(group="verdicts: all rounds of all comparisons")
def test_half_a_percent(benchmark: BenchmarkFixture, ratio: Ratio, launcher: Launcher) -> None:
    """How often 1.5 % are seen with --precision 0.5%, and the trials that took."""
    rng, seen, trials = random.Random(2), [], []
    step_seconds(launcher, CELLS["one"])

    def compare() -> None:
        names, taken = ["one", "slower by 1.5 %"], []
        while len(taken) < LEAST_TRIALS or any((estimate([one[n] for one in taken]).precision or 1.0) > 0.005 for n in names):
            taken += rounds(launcher, names, 1, False, rng)
        seen.append(verdict(taken, "slower by 1.5 %") == "slower")
        trials.append(float(len(taken)))

    benchmark.pedantic(compare, rounds=max(1, COMPARISONS // 10))
    ratio(f"A/B of 1.5 % at --precision 0.5%, seen in {len(seen)} comparisons, share", [sum(seen) / len(seen)], "at least 0.95")
    ratio("trials that --precision 0.5% took", trials, "")
