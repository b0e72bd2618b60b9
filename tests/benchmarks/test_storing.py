"""Cost of a million recorded steps: writing, reading and summarising them, and how it grows.

Run by `make bench`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from harness.cell.cell import Cell
from harness.record.run_record import RunRecord
from harness.record.store import Store, TrialKey
from harness.record.trial import TrialRecord
from tests.benchmarks.conftest import Ratio
from tests.unit.stored_trials import one_cell_run, step, trial_row

MILLIONS = float(os.environ.get("BENCH_MILLIONS", "1"))
STEPS = 10_000
"""Step rows of each trial: 8 ranks by 1,250 steps."""
_SUMMARISE = """
import re, sys, time
began = time.perf_counter()
from harness.record.store import load
from harness.analysis.summary import cells
results = load(sys.argv[1])
assert len(cells(results.trials)) == len(results.trials) // 10 or len(results.trials) < 10
seconds = time.perf_counter() - began
status = open("/proc/self/status").read()
print(len(results.steps), seconds, int(re.search(r"VmHWM:\\s*(\\d+)", status)[1]) / 1024)
"""


def written(store: Store, rows: int) -> float:
    """Returns the seconds to write `rows` step rows with 10 trials per cell, including the copy
    that a run makes at its end."""
    seconds = 0.0
    store.write_run(RunRecord(**one_cell_run()))
    for number in range(rows // STEPS):
        one = Cell(strategy="ddp", devices=8, options={"bucket_cap_mb": float(1 + number // 10)})
        key = TrialKey(one.id, number % 10)
        row = {**trial_row(one), "trial": key.trial}
        steps = [step(key, n // 8, n % 8) for n in range(STEPS)]
        began = time.perf_counter()
        store.write_trial(TrialRecord(**row), steps)
        seconds += time.perf_counter() - began
    began = time.perf_counter()
    store.gather("run-1")
    return seconds + time.perf_counter() - began


def summarised(folder: Path) -> tuple[float, float]:
    """Returns the seconds from first import to summary and the peak MiB of a new process."""
    done = subprocess.run(
        [sys.executable, "-c", _SUMMARISE, str(folder)], capture_output=True, text=True, check=True
    )
    _, seconds, mebibytes = done.stdout.split()
    return float(seconds), float(mebibytes)


@pytest.mark.benchmark(group="storing a million step rows, and ten times as many")
def test_a_million_steps(benchmark: BenchmarkFixture, ratio: Ratio, tmp_path: Path) -> None:
    rows = int(MILLIONS * 1e6)
    writing = [benchmark.pedantic(written, (Store(tmp_path / "one"), rows), rounds=1)]
    ratio(f"seconds to write {rows:,} step rows", writing, "at most 5")
    seconds, memory = zip(*(summarised(tmp_path / "one") for _ in range(5)), strict=True)
    ratio("seconds to read and summarise them", seconds, "at most 3")
    ratio("MiB that took", memory, "at most 1024")
    ratio(
        "writing ten times as many, over ten times the time",
        [written(Store(tmp_path / "ten"), 10 * rows) / (10 * writing[0])],
        "1.0",
    )
    ten = [summarised(tmp_path / "ten")[0] for _ in range(3)]
    ratio(
        "summarising ten times as many, over ten times the time",
        [many / (10 * min(seconds)) for many in ten],
        "at most 1.0",
    )
