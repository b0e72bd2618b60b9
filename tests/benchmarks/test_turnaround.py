"""What the suite itself costs, side by side with what it is compared to. Run by `make bench`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from harness.launch import Launcher
from harness.workloads import make_workload, prepare_data
from tests.ranks.conftest import cell
from tests.unit.test_store import step, trial_row

ROOT = Path(__file__).parents[2]


@pytest.mark.benchmark(group="start of the command line")
@pytest.mark.parametrize("words", [["-c", "pass"], ["-m", "bench", "--help"]], ids=["python", "bench --help"])
def test_start(benchmark: BenchmarkFixture, words: list[str]) -> None:
    benchmark.pedantic(subprocess.run, ([sys.executable, *words],), {"cwd": ROOT, "capture_output": True, "check": True}, rounds=10)


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return Launcher()


@pytest.mark.benchmark(group="a two-rank cell of 8 nano steps, from launch to answer")
def test_warm_cell(benchmark: BenchmarkFixture, launcher: Launcher) -> None:
    """`extra_info` holds what the cell cost beyond its own steps."""
    one = cell("ddp")
    data = prepare_data(one.data, make_workload(one.workload), one.sequence_length)
    launcher.run(one, data, 2)
    beyond = []

    def launch() -> None:
        outcome = launcher.run(one, data, 2)
        assert outcome.status == "ok"
        beyond.append(outcome.wall_seconds - sum(s["step_seconds"] for s in outcome.answers[0]["steps"]))

    benchmark.pedantic(launch, rounds=10)
    benchmark.extra_info["median seconds beyond its steps"] = round(sorted(beyond)[len(beyond) // 2], 3)


@pytest.mark.benchmark(group="a two-rank cell of 8 nano steps, from launch to answer")
def test_torchrun_alone(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """torchrun with a script that only imports the same libraries and all-reduces once."""
    script = tmp_path / "plain.py"
    script.write_text(
        "import torch, torch.distributed as dist\nfrom transformers import LlamaForCausalLM\n"
        "dist.init_process_group('gloo')\ndist.all_reduce(torch.ones(1))\ndist.destroy_process_group()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    benchmark.pedantic(subprocess.run, (command,), {"capture_output": True, "check": True}, rounds=3)


@pytest.mark.benchmark(group="recording a trial of 1,000 step rows")
def test_recording(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    from harness.cell import Cell
    from harness.store import Store, TrialKey

    store, one = Store(tmp_path), Cell(strategy="ddp", devices=2)
    row, steps = trial_row(one), [step(TrialKey(one.id, 0), n) for n in range(1000)]
    benchmark(store.write_trial, row, steps)
