"""How often a run of `full`'s design finds planted differences, by launches of its own.

One run of DDP and of cells that are as fast, or slower by a known share: BENCH_PLANTED of each
(12), with options of their own, so that each makes a comparison with the baseline. Here the answer
hardly depends on a cell that is slower than most.

Another one of pairs, DDP and a cell of each, in settings of their own: there the answer depends on
the pair, which gets further launches until it is known. BENCH_PAIRS pairs (16) differ by 5 %, a
third as many by 10 %, a third as many by nothing.

Number and length of launches and the rule for further rounds are those of matrix `full`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.matrix import read_matrix
from harness.analysis.answer import answer
from harness.analysis.estimates import estimates_of
from harness.analysis.setting import by_setting
from harness.analysis.stats import CONFIDENCE, Comparison, LogEstimate
from harness.analysis.stats import ratio as over
from harness.analysis.summary import cell_results
from harness.record.store import Store
from harness.record.trial import TrialRecord
from tests.benchmarks.conftest import Ratio

OF_EACH = int(os.environ.get("BENCH_PLANTED", "12"))
PLANTED = (0, 5, 10)
"""Percent of a step's time that is added to it."""
PAIRS = int(os.environ.get("BENCH_PAIRS", "16"))
SHORTEST_SEQUENCE = 64
"""Tokens; the pairs are told apart by the length of their sequences."""
MOST_SECONDS_A_PAIR = 60
"""Of the run's time, on average."""
SETTINGS = int(os.environ.get("BENCH_SETTINGS", "20"))
EQUALS = 4
MOST_SECONDS_A_SETTING = 45


def trials_of(
    folder: Path, cells: Sequence[Mapping[str, Any]], minutes: float | None = None
) -> pd.DataFrame:
    """Runs the cells; returns their trials.

    `minutes`: the time budget, which is otherwise a share of the first rounds' time.
    """
    full = read_matrix("full")
    matrix = {
        "trials": full.trials,
        "timed_seconds": full.timed_seconds,
        "time_budget_minutes": minutes,
        "defaults": full.defaults | {"workload": "llama-mini", "devices": 2},
        "cells": cells,
    }
    file = folder / "planted.yaml"
    file.write_text(json.dumps(matrix))
    command = [sys.executable, "-m", "bench", "run", "--matrix", str(file), "--no-report"]
    subprocess.run([*command, "--results", str(folder / "results")], check=True)
    return Store(folder / "results").load(steps=False).trials


def estimates(
    folder: Path, cells: Sequence[Mapping[str, Any]], minutes: float | None = None
) -> list[tuple[TrialRecord, LogEstimate]]:
    """Runs the cells; returns one trial of each cell, and the cell's throughput."""
    trials = TrialRecord.from_frame(trials_of(folder, cells, minutes))
    found = estimates_of(trials).cells
    by_cell = {trial.cell_id: trial for trial in trials}
    return [(trial, found[cell_id]) for cell_id, trial in by_cell.items()]


def slowed(percent: float) -> Mapping[str, Any]:
    return {"strategy": "slowed", "options": {"percent": percent}}


def percent_of(trial: TrialRecord) -> float:
    """Planted; 0 for DDP itself."""
    return float(json.loads(trial.options).get("percent", 0.0))


@pytest.mark.timeout(0)
@pytest.mark.benchmark(group="planted differences, by launches")
def test_planted_differences(
    benchmark: BenchmarkFixture, ratio: Ratio, plugin: object, tmp_path: Path
) -> None:
    """Of comparisons with the baseline, and of all pairs of cells: the former share its error, so
    that in one run nearly all of them can be off to the same side."""
    percents = [planted + number / 1000 for planted in PLANTED for number in range(OF_EACH)]
    cells = [{"strategy": "ddp"}, *map(slowed, percents)]
    measured = benchmark.pedantic(lambda: estimates(tmp_path, cells), rounds=1)
    (baseline,) = (cell for trial, cell in measured if trial.strategy == "ddp")
    everything = [(int(percent_of(trial)), cell) for trial, cell in measured]
    pairs = [(a, b) for a, b in itertools.permutations(everything, 2) if a[0] <= b[0]]
    for whose, compared in (
        ("with the baseline", [pair for pair in pairs if pair[0][1] is baseline]),
        ("of two cells", pairs),
    ):
        for planted in PLANTED:
            those = [(a, b) for (one, a), (other, b) in compared if (one, other) == (0, planted)]
            seen = [told_apart(a, b) for a, b in those]
            what = f"{planted} % planted, called different, {len(seen)} comparisons {whose}, share"
            ratio(what, [statistics.fmean(seen)], "at most 0.005" if planted == 0 else "")
        held = [holds(over(a, b, CONFIDENCE), one, other) for (one, a), (other, b) in compared]
        what = f"intervals of 95 % that hold, {len(held)} comparisons {whose}, share"
        ratio(what, [statistics.fmean(held)], "at least 0.94")


@pytest.mark.timeout(0)
@pytest.mark.benchmark(group="planted differences, by launches")
def test_pairs_on_which_the_answer_depends(
    benchmark: BenchmarkFixture, ratio: Ratio, plugin: object, tmp_path: Path
) -> None:
    """Each pair is a comparison of its own, of cells that share nothing with other pairs."""
    fewer = math.ceil(PAIRS / 3)
    planted = [*(5,) * PAIRS, *(10,) * fewer, *(0,) * fewer]
    cells = [
        cell | {"sequence_length": SHORTEST_SEQUENCE + number}
        for number, percent in enumerate(planted)
        for cell in ({"strategy": "ddp"}, slowed(percent))
    ]
    minutes = len(planted) * MOST_SECONDS_A_PAIR / 60
    measured = benchmark.pedantic(lambda: estimates(tmp_path, cells, minutes), rounds=1)
    by_strategy = {(trial.strategy, trial.sequence_length): cell for trial, cell in measured}
    pairs = [
        (percent, by_strategy["ddp", length], by_strategy["slowed", length])
        for length, percent in enumerate(planted, SHORTEST_SEQUENCE)
    ]
    for percent, wanted in ((5, "at least 0.90"), (10, "at least 0.98"), (0, "at most 0.005")):
        those = [(a, b) for of, a, b in pairs if of == percent]
        what = f"{percent} % planted, called different, {len(those)} pairs, share"
        ratio(what, [statistics.fmean(told_apart(a, b) for a, b in those)], wanted)
        launches = [a.trials + b.trials for a, b in those]
        ratio(f"{percent} % planted, launches of a pair, mean", [statistics.fmean(launches)], "")
    held = [holds(over(a, b, CONFIDENCE), 0, percent) for percent, a, b in pairs]
    ratio(f"intervals of 95 % that hold, {len(held)} pairs, share", [statistics.fmean(held)], "")


@pytest.mark.timeout(0)
@pytest.mark.benchmark(group="planted differences, by launches")
def test_advice_among_equals(
    benchmark: BenchmarkFixture, ratio: Ratio, plugin: object, tmp_path: Path
) -> None:
    """BENCH_SETTINGS settings (20), each with DDP and four cells that are as fast under another
    name: nothing is known to beat DDP, so DDP must remain the advice."""
    cells = [
        cell | {"sequence_length": SHORTEST_SEQUENCE + number}
        for number in range(SETTINGS)
        for cell in ({"strategy": "ddp"}, *(slowed(other / 1000) for other in range(EQUALS)))
    ]
    minutes = SETTINGS * MOST_SECONDS_A_SETTING / 60
    trials = benchmark.pedantic(lambda: trials_of(tmp_path, cells, minutes), rounds=1)
    answers = [answer(group) for group in by_setting(cell_results(trials))]
    advised = [found.advice[0].cell.cell.strategy == "ddp" for found in answers if found]
    what = f"equal cells, DDP is the advice, {len(advised)} settings, share"
    ratio(what, [statistics.fmean(advised)], "at least 0.95")


def told_apart(first: LogEstimate, second: LogEstimate) -> bool:
    return over(first, second).verdict != "no difference seen"


def holds(interval: Comparison, first: int, second: int) -> bool:
    """Whether the interval of one throughput over another has what the percents planted make it."""
    assert interval.low is not None
    assert interval.high is not None
    return interval.low <= (100 + second) / (100 + first) <= interval.high
