"""Endings that ranks cannot report: an out-of-memory kill, a failed start, or a changed clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cell.cell import Cell
from harness.host.cores import oom_kills
from harness.launch.outcome import Outcome, RankOutputs, classify_end
from harness.worker.rank_answer import RankAnswer

CELL = Cell(strategy="ddp", devices=2)


@pytest.mark.parametrize(
    ("groups", "file", "content"),
    [
        ("4:memory:/job", "memory/job/memory.oom_control", "under_oom 0\noom_kill 3\n"),
        ("0::/job", "job/memory.events", "high 0\noom 9\noom_kill 3\noom_group_kill 0\n"),
        ("0::/\n4:memory:/job", "memory/job/memory.oom_control", "oom_kill 3\n"),
        ("0::/job", "../proc/vmstat", "nr_free_pages 5\noom_kill 3\n"),
    ],
)
def test_kills_for_lack_of_memory_are_counted(
    tmp_path: Path, groups: str, file: str, content: str
) -> None:
    process = tmp_path / "proc" / "self"
    process.mkdir(parents=True)
    assert oom_kills(process, tmp_path / "cgroup") is None
    (process / "cgroup").write_text(groups + "\n")
    (tmp_path / "cgroup").mkdir()
    (place := tmp_path / "cgroup" / file).parent.mkdir(parents=True, exist_ok=True)
    place.write_text(content)
    assert oom_kills(process, tmp_path / "cgroup") == 3


def test_a_rank_that_the_kernel_killed_is_out_of_memory() -> None:
    left = RankOutputs(exit_codes={1: -9}, oom_kills=1)
    left.add(RankOutputs(exit_codes={0: -15}))
    end = classify_end(CELL, 2, left)
    assert end.status == "out_of_memory"
    assert end.reason.startswith("rank 1 was killed by SIGKILL")
    assert end.reason.endswith("rose by 1")


def test_ranks_that_cannot_be_started_have_failed_with_the_reason() -> None:
    left = RankOutputs(not_started="OSError: [Errno 98] Address already in use")
    assert not left.succeeded
    end = classify_end(CELL, 2, left)
    assert end.status == "failed"
    assert left.not_started in end.reason


@pytest.mark.parametrize(("entered_at", "seconds"), [(101.5, 1.5), (-3500.0, None), (3700.0, None)])
def test_a_clock_that_was_set_gives_no_start_up_time(
    entered_at: float, seconds: float | None
) -> None:
    answers = (RankAnswer(0, entered_at=entered_at),)
    outcome = Outcome("ok", "", started_at=100.0, wall_seconds=3.0, answers=answers)
    assert outcome.startup_seconds == seconds
