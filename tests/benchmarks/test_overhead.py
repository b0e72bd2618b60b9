"""Step time of the suite over that of a hand-written script; both trainings are interleaved."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from harness.analysis.stats import slowest
from harness.cell.cell import Cell
from harness.launch.launcher import Launcher
from tests.benchmarks.conftest import Ratio, steps_of
from tests.conftest import runs

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
STEPS_IN_A_TURN = 5
ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
"""Settings in bytes that make glibc keep freed memory; the second is the largest it accepts."""


@pytest.fixture(autouse=True, scope="module")
def the_same_allocator(launcher: Launcher) -> Iterator[None]:
    """Gives the suite's ranks and the script's the same allocator settings.

    glibc decides from earlier frees whether to return memory to the kernel. Under FSDP2, a script
    that had freed a 16 MB array before its first step took no page faults. One that had not took
    300 a step, and its steps took 6% longer. The suite was 2% slower than the former and 4%
    faster than the latter.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, size in ALLOCATOR.items():
            patch.setenv(name, size)
        launcher._restart_fork_server()
        yield
    launcher._restart_fork_server()


def cell_of(name: str) -> Cell:
    axes = {
        "devices": 2,
        "workload": "llama-micro",
        "global_batch": 8,
        "sequence_length": 64,
        "warmup_steps": 5,
        "timed_steps": 100,
    }
    return Cell(**{**axes, "parity_steps": 3, **STRATEGIES[name]})


def script(name: str, devices: int, folder: Path) -> subprocess.Popen[str]:
    """Starts the script, which sets up its training and waits."""
    folder.mkdir()
    (folder / "wait").touch()
    if name == "horovod":
        start = [
            str(Path(sys.executable).with_name("horovodrun")),
            "--gloo",
            "--network-interface",
            "lo",
            "-np",
            "2",
            sys.executable,
        ]
    elif devices == 1:
        start = [sys.executable]
    else:
        start = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(devices),
        ]
    command, environment = (
        [*start, str(PLAIN), name, str(folder)],
        {**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


class Turns:
    """Interleaves two trainings by suspending and resuming their ranks from outside.

    A slow spell of the machine then affects both alike, even if it is shorter than a launch. A step
    that is suspended lasts a turn longer and is left out.
    """

    def __init__(self, launcher: Launcher, folder: Path, devices: int, turn_seconds: float) -> None:
        self.launcher, self.folder, self.devices, self.turn_seconds = (
            launcher,
            folder,
            devices,
            turn_seconds,
        )
        self.thread = threading.Thread(target=self.take)

    def begin(self, step: int, seconds: float) -> None:
        """Starts the turns at the suite's first step, when the script has long been ready."""
        if not self.thread.ident:
            self.thread.start()

    def take(self) -> None:
        sides = [
            psutil.Process(self.launcher.fork_server).children(),
            [
                psutil.Process(int((self.folder / f"{rank}.pid").read_text()))
                for rank in range(self.devices)
            ],
        ]
        (self.folder / "wait").unlink()
        trains = 1
        while all(any(runs(rank) for rank in side) for side in sides):
            for side, tell in (
                (sides[1 - trains], psutil.Process.suspend),
                (sides[trains], psutil.Process.resume),
            ):
                for rank in side:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        tell(rank)
            trains = 1 - trains
            time.sleep(self.turn_seconds)
        for rank in itertools.chain(*sides):
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.resume()


def by_turn(steps: Sequence[float], untimed: int, turn_seconds: float) -> dict[int, float]:
    """Returns the median of the complete steps in each turn, in seconds.

    A step at least as long as a turn of the other side marks the end of a turn.
    """
    turns: list[list[float]] = [[]]
    for number, seconds in enumerate(steps):
        if seconds >= turn_seconds:
            turns.append([])
        elif number >= untimed:
            turns[-1].append(seconds)
    return {number: statistics.median(turn) for number, turn in enumerate(turns) if turn}


def compared(suite: Mapping[int, float], script: Mapping[int, float]) -> float:
    """Returns the suite's time over the script's: the median ratio of the suite's turns to the
    script's turns before and after them."""
    numbers = sorted(script)
    logs = []
    for number, seconds in suite.items():
        # The script has the first turn, so its turn of the same number comes before the suite's.
        after = bisect.bisect(numbers, number)
        if 0 < after < len(numbers):
            around = (math.log(script[at]) for at in numbers[after - 1 : after + 1])
            logs.append(math.log(seconds) - statistics.fmean(around))
    return math.exp(statistics.median(logs))


def both(
    launcher: Launcher, name: str, folder: Path, turn_seconds: float
) -> tuple[dict[int, float], dict[int, float]]:
    """Interleaves suite and script; returns their step times per turn, of the slowest rank."""
    one = cell_of(name)
    by_hand = script(name, one.devices, folder)
    while len(list(folder.glob("*.pid"))) < one.devices:
        assert by_hand.poll() is None, by_hand.communicate()[0]
        time.sleep(0.05)
    launcher.ignore_pid(by_hand.pid)
    turns = Turns(launcher, folder, one.devices, turn_seconds)
    suite = steps_of(launcher, one, turns.begin)
    turns.thread.join()
    output, _ = by_hand.communicate()
    files = sorted(folder.glob("*.json"))
    assert len(files) == one.devices, output
    by_script = slowest([json.loads(file.read_text()) for file in files])
    return by_turn(suite, one.warmup_steps, turn_seconds), by_turn(
        by_script, one.warmup_steps, turn_seconds
    )


@pytest.mark.benchmark(group="overhead: a launch of a cell and one of a plain script, interleaved")
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.timeout(120 + 60 * ROUNDS)
def test_overhead(
    benchmark: BenchmarkFixture, ratio: Ratio, launcher: Launcher, tmp_path: Path, name: str
) -> None:
    turn_seconds = STEPS_IN_A_TURN * statistics.median(steps_of(launcher, cell_of(name)))
    pairs: list[tuple[dict[int, float], dict[int, float]]] = []

    def pair() -> None:
        pairs.append(both(launcher, name, tmp_path / str(len(pairs)), turn_seconds))

    benchmark.pedantic(pair, rounds=ROUNDS)
    medians = [
        [1e3 * statistics.median(turns.values()) for turns in side]
        for side in zip(*pairs, strict=True)
    ]
    benchmark.extra_info["step milliseconds"] = [
        round(statistics.median(side), 2) for side in medians
    ]
    ratio(
        f"step time over a plain script's: {name}",
        [compared(suite, script) for suite, script in pairs],
        "1.00 +- 0.02",
    )
