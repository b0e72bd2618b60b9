"""Cost of the suite itself, next to plain Python and a plain script. Run by `make bench`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from harness.launch.launcher import Launcher
from harness.record.plan import Plan
from harness.record.store import Store
from harness.run.runner import ProgressListener, Runner
from tests.benchmarks.conftest import Ratio
from tests.ranks.conftest import cell

ROOT, PLAIN = Path(__file__).parents[2], Path(__file__).with_name("plain.py")


@pytest.mark.benchmark(group="start of the command line")
@pytest.mark.parametrize(
    "words", [["-c", "pass"], ["-m", "bench", "--help"]], ids=["python", "bench --help"]
)
def test_start(benchmark: BenchmarkFixture, words: list[str]) -> None:
    benchmark.pedantic(
        subprocess.run,
        ([sys.executable, *words],),
        {"cwd": ROOT, "capture_output": True, "check": True},
        rounds=10,
    )


CELLS = 30
SCRIPTS = 5


@pytest.mark.benchmark(
    group="turnaround: a matrix of 30 two-rank cells, and a script under torchrun for some of them"
)
def test_turnaround(
    benchmark: BenchmarkFixture, ratio: Ratio, launcher: Launcher, tmp_path: Path
) -> None:
    """Measures a cell's seconds beyond its steps, next to a script's.

    Recording and the check for foreign load are included.
    """
    wanted = [cell("ddp", options={"bucket_cap_mb": float(1 + n)}) for n in range(CELLS)]
    store, by_script = Store(tmp_path / "results"), []
    script = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(PLAIN),
        "ddp",
        str(tmp_path),
    ]

    def matrix() -> float:
        plan = Plan.new("turnaround", wanted, 1, [])
        runner = Runner(store, plan, launcher=lambda packages: launcher)
        runner.begin()
        began = time.perf_counter()
        assert runner.run(ProgressListener())
        whole = time.perf_counter() - began
        taken = store.load([plan.run_id])
        assert set(taken.trials["status"]) == {"ok"}
        return (whole - float(taken.steps[taken.steps["rank"] == 0]["step_seconds"].sum())) / CELLS

    matrix()  # warms up: the reference run is kept from here on
    beyond = [benchmark.pedantic(matrix, rounds=1)]
    for _ in range(SCRIPTS):
        began = time.perf_counter()
        subprocess.run(script, capture_output=True, check=True)
        steps = json.loads((tmp_path / "0.json").read_text())
        by_script.append(time.perf_counter() - began - sum(steps))
        beyond.append(matrix())
    ratio("seconds of a warm two-rank cell beyond its steps", beyond, "at most 0.5")
    ratio(
        "a script under torchrun costs beyond its steps, times a cell",
        [s / b for s, b in zip(by_script, beyond[1:], strict=True)],
        "at least 8",
    )
