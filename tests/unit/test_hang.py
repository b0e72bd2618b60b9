"""Hanging ranks: found by missing heartbeats, distinguished from slow ones, and the cause named."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.cell.cell import Cell
from harness.host.tcp_store import RENDEZVOUS_SECONDS
from harness.launch.outcome import RankOutputs, classify_end
from harness.launch.watch import (
    COLD_GPU_SECONDS,
    SECONDS,
    VARIABLE,
    Hang,
    Silence,
    Watch,
    ask_ranks,
    missing,
)
from harness.worker.rank_answer import answer_file
from harness.worker.reporting import RENDEZVOUS, GroupState, Heartbeat, read_beat
from harness.worker.spec import stacks_file
from tests.waiting import until

BUSY = "while True: pass"
IDLE = "import time; time.sleep(60)"
WAITS = """Thread 0x1 (most recent call first):
  File "/x/threading.py", line 1 in wait

Current thread 0x2 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 9 in all_reduce
  File "/x/mine.py", line 5 in step
"""
SLEEPS = """Current thread 0x2 (most recent call first):
  File "/x/mine.py", line 7 in step
  File "/x/harness/worker/loop.py", line 7 in run_step
"""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("harness.worker.reporting.time.monotonic", made)
    return made


def silence(folder: Path, ranks: int = 1, pid: int | None = None) -> Silence:
    return Silence(str(folder), range(ranks), lambda: {} if pid is None else {0: pid})


def looks(watch: Silence, seconds: float) -> Hang | None:
    """Looks twice a second for this many seconds, or until there is a hang."""
    for _ in range(int(2 * seconds)):
        if found := watch.look(0.5):
            return found
    return None


def test_a_rank_that_finishes_steps_does_not_hang(tmp_path: Path, clock: Clock) -> None:
    heart, watch = Heartbeat(tmp_path, 0), silence(tmp_path)
    for step in range(5):
        clock.now += 14
        heart.beat(f"step {step + 1}", step + 1)
        assert looks(watch, 14) is None


def test_silence_is_a_hang_after_its_time(tmp_path: Path, clock: Clock) -> None:
    hearts, watch = [Heartbeat(tmp_path, rank) for rank in range(2)], silence(tmp_path, 2)
    for heart in hearts:
        heart.beat("step 3", 3)
    assert looks(watch, 14.5) is None
    found = looks(watch, 2)
    assert found is not None
    assert found.doing == {0: "step 3", 1: "step 3"}
    assert {"15", "3"} <= set(found.description().split())


def test_ten_times_the_longest_phase_is_allowed(tmp_path: Path, clock: Clock) -> None:
    heart, watch = Heartbeat(tmp_path, 0), silence(tmp_path)
    clock.now += 4
    heart.beat("step 1", 1)
    assert looks(watch, 39) is None
    assert looks(watch, 3)


def test_the_time_can_be_chosen(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    Heartbeat(tmp_path, 0).beat("step 1", 1)
    monkeypatch.setenv(VARIABLE, "2")
    assert looks(silence(tmp_path), 3)
    monkeypatch.setenv(VARIABLE, "0")
    assert looks(silence(tmp_path), 300) is None


def test_a_suspension_is_no_silence(tmp_path: Path, clock: Clock) -> None:
    """The watching process is stopped too, or sleeps with its machine."""
    Heartbeat(tmp_path, 0).beat("step 1", 1)
    watch = silence(tmp_path)
    assert watch.look(0.5) is None
    assert watch.look(3600.0) is None
    assert looks(watch, 10) is None


def test_a_rank_that_has_answered_or_has_not_begun_does_not_hang(
    tmp_path: Path, clock: Clock
) -> None:
    Heartbeat(tmp_path, 0).beat("end", 8)
    answer_file(tmp_path, 0).write_text("{}")
    assert looks(silence(tmp_path, 2), 60) is None


@pytest.mark.slow
@pytest.mark.parametrize(("program", "hangs"), [(BUSY, False), (IDLE, True)])
def test_work_before_the_first_step_is_a_sign_of_life(
    tmp_path: Path, program: str, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    Heartbeat(tmp_path, 0).beat("set-up")
    command = [sys.executable, "-c", f"print(1, flush=True)\n{program}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout
    worked = psutil.Process(process.pid).cpu_times
    try:
        process.stdout.readline()
        watch, found = silence(tmp_path, pid=process.pid), None
        for _ in range(6):
            before = worked().user
            time.sleep(0.3)
            if not hangs:  # on a busy machine, until it has had as much of a core
                until(lambda since=before: worked().user - since >= 0.3)
            found = found or watch.look(0.3)
    finally:
        process.kill()
        process.communicate()
    assert bool(found) == hangs


def test_a_rank_that_waits_for_one_that_works_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank may build the model and send it to the others."""
    Heartbeat(tmp_path, 0).beat("set-up")
    Heartbeat(tmp_path, 1).beat("set-up")
    watch = Silence(str(tmp_path), range(2), lambda: {0: 10, 1: 11})
    monkeypatch.setattr(Silence, "_works", lambda self, pid, passed: pid == 11)
    assert looks(watch, 30) is None
    monkeypatch.setattr(Silence, "_works", lambda self, pid, passed: False)
    assert looks(watch, 16)


def test_ranks_of_other_nodes_may_come_later(tmp_path: Path) -> None:
    Heartbeat(tmp_path, 0).beat(RENDEZVOUS)
    assert looks(Silence(str(tmp_path), range(1), dict), 16)
    watch = Silence(str(tmp_path), range(1), dict, other_nodes=True)
    assert looks(watch, RENDEZVOUS_SECONDS - 1) is None
    assert looks(watch, 2)


def test_gpus_may_start_slowly_and_steps_on_them_may_not(tmp_path: Path) -> None:
    """A driver that wakes eight GPUs keeps a rank in the kernel without using a core; the other
    ranks wait for the slowest."""
    cold, warm = (Heartbeat(tmp_path, rank) for rank in range(2))
    cold.beat(RENDEZVOUS)
    warm.beat("step 1", 1)
    watch = Silence(str(tmp_path), range(2), dict, on_gpus=True)
    assert looks(watch, COLD_GPU_SECONDS - 1) is None
    assert looks(watch, 2)
    cold.beat("step 1", 1)
    watch = Silence(str(tmp_path), range(2), dict, on_gpus=True)
    assert looks(watch, SECONDS - 1) is None
    assert looks(watch, 2)


def test_ranks_that_restart_are_ended_until_the_trial_is_over(tmp_path: Path) -> None:
    """Torch's elastic agent restarts ranks that were killed; nothing is killed before the limit."""
    kills: list[float] = []
    began = time.monotonic()
    with Watch(str(tmp_path), range(1), 0.2, lambda: kills.append(time.monotonic()), float):
        until(lambda: len(kills) >= 3)
    assert kills[0] - began > 0.1
    ended = len(kills)
    time.sleep(0.3)
    assert len(kills) == ended
    with Watch(str(tmp_path), range(1), 60, kills.clear, float):
        pass
    assert kills


def group(entered: int, name: str = "0", ranks: tuple[int, ...] = (0, 1, 2)) -> GroupState:
    return GroupState(name, ranks, entered, "gloo:all_reduce")


@pytest.mark.parametrize(
    ("groups", "stacks", "fact"),
    [
        ({0: [group(17)], 1: [group(16)], 2: [group(17)]}, {}, "rank 1 .*gloo:all_reduce 17"),
        ({0: [group(17)], 1: [], 2: []}, {}, "ranks 1, 2 .*gloo:all_reduce 17"),
        (
            {0: [group(3), group(2, "1", (0, 1))], 1: [group(3), group(1, "1", (0, 1))]},
            {},
            "rank 1 .*gloo:all_reduce 2 .*group 1",
        ),
        ({0: [], 1: []}, {0: WAITS, 1: SLEEPS}, "rank 1 "),
        ({0: [], 1: []}, {0: WAITS}, "rank 1 "),
        ({0: [group(4)], 1: [group(4)], 2: [group(4)]}, {0: SLEEPS, 1: SLEEPS}, "^$"),
    ],
)
def test_the_missing_rank_is_named(
    groups: dict[int, list[GroupState]], stacks: dict[int, str], fact: str
) -> None:
    assert re.search(fact, missing(groups, stacks))


def test_hangs_of_two_nodes_are_one_timeout() -> None:
    left = RankOutputs(hang=Hang(15.0, {0: "step 2"}), groups={0: [group(5, ranks=(0, 1))]})
    left.add(RankOutputs(hang=Hang(16.2, {1: "step 2"}), groups={1: [group(4, ranks=(0, 1))]}))
    end = classify_end(Cell(strategy="ddp", devices=2, nodes=2), 2, left)
    assert end.status == "timeout"
    for fact in ("16 s", "step 2;", "rank 1", "gloo:all_reduce 5,", "2 ranks"):
        assert fact in end.reason


def test_a_beat_is_read_as_it_was(tmp_path: Path) -> None:
    assert read_beat(tmp_path, 3) is None
    Heartbeat(tmp_path, 3).beat("x" * 500, 7)
    found = read_beat(tmp_path, 3)
    assert found is not None
    assert (found.steps, found.doing) == (7, "x" * 64)


def test_native_stacks_come_from_py_spy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle: int
) -> None:
    program = tmp_path / "py-spy"
    program.write_text('#!/bin/sh\necho "native stack of $*"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    ask_ranks(str(tmp_path), {0: idle})
    assert f"native stack of dump --native --pid {idle}" in stacks_file(tmp_path, 0).read_text()


@pytest.fixture
def idle() -> Iterator[int]:
    """Starts a process that dumps its stacks on a signal; yields its process id."""
    setup = "import faulthandler as f, signal as s, time; f.register(s.SIGUSR1)"
    command = [sys.executable, "-c", f"{setup}; print(1, flush=True); time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout
        process.stdout.readline()
        yield process.pid
        process.kill()
