"""How often a run of `full`'s design finds planted differences, by launches of its own.

One run of DDP and of cells that are as fast, or slower by a known share: BENCH_PLANTED of each
(12), with options of their own, so that each makes a comparison with the baseline. Number and
length of launches and the rule for further rounds are those of matrix `full`.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.matrix import read_matrix
from harness.analysis.estimates import estimates_of
from harness.analysis.stats import CONFIDENCE, Comparison, LogEstimate
from harness.analysis.stats import ratio as over
from harness.record.store import Store
from harness.record.trial import TrialRecord
from tests.benchmarks.conftest import Ratio

OF_EACH = int(os.environ.get("BENCH_PLANTED", "12"))
PLANTED = (0, 5, 10)
"""Percent of a step's time that is added to it."""


def estimates(folder: Path) -> tuple[LogEstimate, Mapping[float, LogEstimate]]:
    """Launches them all; returns the throughput of the baseline, and of the others by percent."""
    full = read_matrix("full")
    percents = [planted + number / 1000 for planted in PLANTED for number in range(OF_EACH)]
    slowed = [{"strategy": "slowed", "options": {"percent": percent}} for percent in percents]
    matrix = {
        "trials": full.trials,
        "timed_seconds": full.timed_seconds,
        "defaults": full.defaults | {"workload": "llama-mini", "devices": 2},
        "cells": [{"strategy": "ddp"}, *slowed],
    }
    file = folder / "planted.yaml"
    file.write_text(json.dumps(matrix))
    command = [sys.executable, "-m", "bench", "run", "--matrix", str(file), "--no-report"]
    subprocess.run([*command, "--results", str(folder / "results")], check=True)
    trials = TrialRecord.from_frame(Store(folder / "results").load(steps=False).trials)
    found = estimates_of(trials).cells
    options = {trial.cell_id: json.loads(trial.options) for trial in trials}
    (baseline,) = (found[cell] for cell, own in options.items() if not own)
    return baseline, {own["percent"]: found[cell] for cell, own in options.items() if own}


@pytest.mark.timeout(0)
@pytest.mark.benchmark(group="planted differences, by launches")
def test_planted_differences(
    benchmark: BenchmarkFixture, ratio: Ratio, plugin: object, tmp_path: Path
) -> None:
    """Of comparisons with the baseline, and of all pairs of cells: the former share its error, so
    that in one run nearly all of them can be off to the same side."""
    baseline, cells = benchmark.pedantic(lambda: estimates(tmp_path), rounds=1)
    everything = [(0, baseline), *((int(percent), cell) for percent, cell in cells.items())]
    pairs = [(a, b) for a, b in itertools.permutations(everything, 2) if a[0] <= b[0]]
    for whose, compared in (
        ("with the baseline", [pair for pair in pairs if pair[0][1] is baseline]),
        ("of two cells", pairs),
    ):
        for planted in PLANTED:
            those = [(a, b) for (one, a), (other, b) in compared if (one, other) == (0, planted)]
            seen = [over(a, b).verdict != "no difference seen" for a, b in those]
            what = f"{planted} % planted, called different, {len(seen)} comparisons {whose}, share"
            ratio(what, [statistics.fmean(seen)], "at most 0.005" if planted == 0 else "")
        held = [holds(over(a, b, CONFIDENCE), one, other) for (one, a), (other, b) in compared]
        what = f"intervals of 95 % that hold, {len(held)} comparisons {whose}, share"
        ratio(what, [statistics.fmean(held)], "at least 0.94")


def holds(interval: Comparison, first: int, second: int) -> bool:
    """Whether the interval of one throughput over another has what the percents planted make it."""
    assert interval.low is not None
    assert interval.high is not None
    return interval.low <= (100 + second) / (100 + first) <= interval.high
