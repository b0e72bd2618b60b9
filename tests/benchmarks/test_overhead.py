"""What the suite adds to a step: its step time over that of a script written by hand, launch by launch, one after the other."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from harness.cell import Cell
from harness.launch import Launcher
from harness.stats import percentile, slowest
from tests.benchmarks.conftest import Ratio, step_seconds

PLAIN = Path(__file__).with_name("plain.py")
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "9"))
STRATEGIES: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single", "devices": 1},
    "ddp": {"strategy": "ddp"},
    "fsdp2": {"strategy": "fsdp2"},
    "zero2": {"strategy": "deepspeed", "options": {"stage": 2}},
    "zero3": {"strategy": "deepspeed", "options": {"stage": 3}},
    "pipeline": {"strategy": "pipeline", "micro_batches": 4, "options": {"schedule": "1f1b"}},
    "tensor": {"strategy": "tensor"},
    "horovod": {"strategy": "horovod"},
    "accelerate": {"strategy": "accelerate"},
}


def cell_of(name: str) -> Cell:
    axes = {"devices": 2, "workload": "llama-micro", "global_batch": 8, "sequence_length": 64, "warmup_steps": 5, "timed_steps": 40}
    return Cell(**{**axes, "parity_steps": 3, **STRATEGIES[name]})


def by_hand(name: str, devices: int, folder: Path) -> float:
    """Median step time of the script, the slowest rank's at each step."""
    folder.mkdir()
    if name == "horovod":
        start = [shutil.which("horovodrun", path=str(Path(sys.executable).parent)), "--gloo", "--network-interface", "lo", "-np", "2"]
        start = [*start, sys.executable]
    elif devices == 1:
        start = [sys.executable]
    else:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices)]
    command = [*start, str(PLAIN), name, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}, check=False)
    files = sorted(folder.glob("*.json"))
    assert len(files) == devices, done.stdout + done.stderr
    return percentile(slowest([json.loads(file.read_text()) for file in files]), 0.5)


@pytest.mark.benchmark(group="overhead: a launch of a cell and one of a plain script")
@pytest.mark.parametrize("name", STRATEGIES)
def test_overhead(benchmark: BenchmarkFixture, ratio: Ratio, launcher: Launcher, tmp_path: Path, name: str) -> None:
    one = cell_of(name)
    step_seconds(launcher, one)
    pairs: list[tuple[float, float]] = []

    def both() -> None:
        number = len(pairs)
        folder = tmp_path / str(number)
        if number % 2:
            plain = by_hand(name, one.devices, folder)
            pairs.append((step_seconds(launcher, one), plain))
        else:
            pairs.append((step_seconds(launcher, one), by_hand(name, one.devices, folder)))

    benchmark.pedantic(both, rounds=ROUNDS)
    benchmark.extra_info["step milliseconds"] = [round(1e3 * statistics.median(side), 2) for side in zip(*pairs, strict=True)]
    ratio(f"step time over a plain script's: {name}", [suite / plain for suite, plain in pairs], "1.00 +- 0.02")
