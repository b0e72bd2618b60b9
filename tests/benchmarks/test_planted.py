"""How often real launches of a run designed like `full` find planted differences.

One run has DDP and cells that are as fast, or slower by a known percentage: BENCH_PLANTED of each
(12). Their options differ, so each is compared with the baseline. The answer hardly depends on a
cell that is slower than most.

Another run has pairs of DDP and one such cell, each in its own setting. The answer depends on the
pair, which gets further launches until it is settled. BENCH_PAIRS pairs (16) differ by 5%, a third
as many by 10%, and a third as many not at all.

The number and length of launches and the rule for further rounds are those of matrix `full`.
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
"""Percentages added to a step's time."""
PAIRS = int(os.environ.get("BENCH_PAIRS", "16"))
SHORTEST_SEQUENCE = 64
"""Sequence length of the first pair in tokens; each pair has its own."""
MOST_SECONDS_A_PAIR = 60
"""Average time budget per pair."""
SETTINGS = int(os.environ.get("BENCH_SETTINGS", "20"))
EQUALS = 4
MOST_SECONDS_A_SETTING = 45


def trials_of(
    folder: Path, cells: Sequence[Mapping[str, Any]], minutes: float | None = None
) -> pd.DataFrame:
    """Runs the cells; returns their trials.

    `minutes`: time budget; by default a share of the first rounds' time.
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
    """Runs the cells; returns a trial and the throughput of each cell."""
    trials = TrialRecord.from_frame(trials_of(folder, cells, minutes))
    found = estimates_of(trials).cells
    by_cell = {trial.cell_id: trial for trial in trials}
    return [(trial, found[cell_id]) for cell_id, trial in by_cell.items()]


def slowed(percent: float) -> Mapping[str, Any]:
    return {"strategy": "slowed", "options": {"percent": percent}}


def percent_of(trial: TrialRecord) -> float:
    """Returns the planted percentage; 0 for DDP."""
    return float(json.loads(trial.options).get("percent", 0.0))


@pytest.mark.timeout(0)
@pytest.mark.benchmark(group="planted differences, by launches")
def test_planted_differences(
    benchmark: BenchmarkFixture, ratio: Ratio, plugin: object, tmp_path: Path
) -> None:
    """Counts comparisons with the baseline apart from those of all pairs of cells.

    The former share the baseline's error, so in one run most can be off to the same side.
    """
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
            seen = [differ(a, b) for a, b in those]
            what = f"{planted}% planted, called different, {len(seen)} comparisons {whose}, share"
            ratio(what, [statistics.fmean(seen)], "at most 0.005" if planted == 0 else "")
        held = [holds(over(a, b, CONFIDENCE), one, other) for (one, a), (other, b) in compared]
        what = f"intervals of 95% that hold, {len(held)} comparisons {whose}, share"
        ratio(what, [statistics.fmean(held)], "at least 0.94")


@pytest.mark.timeout(0)
@pytest.mark.benchmark(group="planted differences, by launches")
def test_pairs_on_which_the_answer_depends(
    benchmark: BenchmarkFixture, ratio: Ratio, plugin: object, tmp_path: Path
) -> None:
    """Each pair is an independent comparison: pairs have no cells in common."""
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
        what = f"{percent}% planted, called different, {len(those)} pairs, share"
        ratio(what, [statistics.fmean(differ(a, b) for a, b in those)], wanted)
        launches = [a.trials + b.trials for a, b in those]
        ratio(f"{percent}% planted, launches of a pair, mean", [statistics.fmean(launches)], "")
    held = [holds(over(a, b, CONFIDENCE), 0, percent) for percent, a, b in pairs]
    ratio(f"intervals of 95% that hold, {len(held)} pairs, share", [statistics.fmean(held)], "")


@pytest.mark.timeout(0)
@pytest.mark.benchmark(group="planted differences, by launches")
def test_advice_among_equals(
    benchmark: BenchmarkFixture, ratio: Ratio, plugin: object, tmp_path: Path
) -> None:
    """DDP remains the advice, as no cell is known to beat it.

    Each of BENCH_SETTINGS settings (20) has DDP and four equally fast cells under another name.
    """
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


def differ(first: LogEstimate, second: LogEstimate) -> bool:
    return over(first, second).verdict != "no difference seen"


def holds(interval: Comparison, first: int, second: int) -> bool:
    """Whether the interval of a throughput ratio contains the planted ratio."""
    assert interval.low is not None
    assert interval.high is not None
    return interval.low <= (100 + second) / (100 + first) <= interval.high
