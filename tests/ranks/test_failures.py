"""Failures are recorded with their first cause, the matrix goes on, and no process is left."""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import tempfile
import threading
import time
from typing import Any

import psutil
import pytest

from harness.launch.launcher import Launcher
from harness.workloads import make_workload, prepare_data
from tests.ranks.conftest import RunCells, cell


def faulty(fault: str, **axes: object):
    return cell("faulty", options={"fault": fault}, **axes)


def test_the_rank_that_raised_is_the_cause(run_cells: RunCells) -> None:
    trials = run_cells(faulty("raises"), cell("ddp")).trials.set_index("strategy")
    row = trials.loc["faulty"]
    assert row["status"] == "failed"
    assert row["reason"] == "rank 1: ValueError: the planted mistake"
    assert "Traceback" in row["log_tail"]
    assert "bench_plugin/faulty.py" in row["log_tail"]
    assert trials.loc["ddp", "status"] == "ok"


def test_a_failure_in_setup_is_the_cause(run_cells: RunCells) -> None:
    row = run_cells(faulty("raises_in_setup")).trials.iloc[0]
    assert (row["status"], row["reason"]) == (
        "failed",
        "rank 1: ValueError: the planted mistake in setup",
    )


@pytest.mark.parametrize(
    ("fault", "said", "how"),
    [
        ("killed", "was killed by SIGKILL", "elastic"),
        ("exits", "exited with code 0", "elastic"),
        ("killed", "was killed by SIGKILL", "spawn"),
    ],
)
def test_a_rank_that_vanishes_is_named(
    run_cells: RunCells, fault: str, said: str, how: str
) -> None:
    row = run_cells(faulty(fault, launcher=how)).trials.iloc[0]
    assert row["status"] == "failed"
    assert row["reason"].startswith(f"rank 1 {said}")


def test_a_rank_that_vanishes_is_named_even_if_another_seems_to_fail_first(
    run_cells: RunCells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine both ranks have ended before torch's agent looks, and it names rank 0."""
    wait = multiprocessing.connection.wait

    def late(*asked: Any, **more: Any) -> list[Any]:
        ready = wait(*asked, **more)
        time.sleep(0.3)
        return ready

    monkeypatch.setattr(multiprocessing.connection, "wait", late)
    row = run_cells(faulty("killed")).trials.iloc[0]
    assert row["status"] == "failed"
    assert row["reason"].startswith("rank 1 was killed by SIGKILL")


def test_a_hang_is_a_timeout_with_stacks(run_cells: RunCells) -> None:
    row = run_cells(faulty("hangs", time_limit_seconds=4), trials=3).trials
    assert len(row) == 1, "a cell that timed out is not tried again"
    row = row.iloc[0]
    assert row["status"] == "timeout"
    assert "4 s" in row["reason"]
    assert "faulty.py" in row["stacks"]
    assert "rank 0" in row["stacks"]


def test_a_deadlocked_collective_is_found_long_before_the_time_limit(
    run_cells: RunCells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing heartbeats reveal the deadlock; by default 15 s are allowed."""
    monkeypatch.setenv("PARALLELISM_BENCH_HANG_SECONDS", "3")
    row = run_cells(faulty("hangs", time_limit_seconds=300)).trials.iloc[0]
    assert row["status"] == "timeout"
    assert row["reason"].startswith("hangs: ")
    assert "in step 2; rank 1 never entered gloo:all_reduce" in row["reason"]
    assert "rank 0:" in row["stacks"]
    assert "faulty.py" in row["stacks"].partition("rank 1:")[2]
    assert row["wall_seconds"] < 60


def test_a_timeout_also_ends_ranks_that_torch_restarts(launcher: Launcher) -> None:
    """Torch's elastic agent restarts ranks that were killed, as in cells of `ddp_elastic`."""
    hanging = faulty("hangs", time_limit_seconds=4)
    data = prepare_data(hanging.data, make_workload(hanging.workload), hanging.sequence_length)
    outcome = launcher.run(hanging, data, 2, max_restarts=3)
    assert outcome.status == "timeout"
    assert outcome.wall_seconds < 60


def test_slow_is_a_timeout_too(run_cells: RunCells) -> None:
    assert run_cells(faulty("slow", time_limit_seconds=2)).trials.iloc[0]["status"] == "timeout"


def test_out_of_memory_under_a_limit(run_cells: RunCells) -> None:
    """A cell exceeds its 256 MiB limit by a gigabyte. Larger cells of its kind are then skipped for
    that reason."""
    limited = {"memory_limit_bytes": 256 * 2**20}
    trials = run_cells(
        faulty("out_of_memory", **limited), faulty("out_of_memory", global_batch=16, **limited)
    ).trials
    trials = trials.set_index("global_batch")
    assert trials.loc[8, "status"] == "out_of_memory"
    launched = trials[trials["wall_seconds"].notna()]
    assert set(launched["status"]) == {"out_of_memory"}
    if len(launched) == 1:  # the smaller one came first in the shuffled order
        assert launched.index[0] == 8
        assert trials.loc[16, "status"] == "skipped", "a guess is not a result"
        assert trials.loc[8, "cell_name"] in trials.loc[16, "reason"]
    assert "can't allocate memory" in launched["reason"].iloc[0]
    assert launched["reason"].iloc[0].startswith("rank 1")


def test_a_limit_that_suffices_is_no_failure(run_cells: RunCells) -> None:
    assert run_cells(cell("ddp", memory_limit_bytes=512 * 2**20)).trials.iloc[0]["status"] == "ok"


def test_not_a_number_is_diverged(run_cells: RunCells) -> None:
    row = run_cells(faulty("nan")).trials.iloc[0]
    assert row["status"] == "diverged"
    assert "not finite at step 2" in row["reason"]


def test_a_strategy_that_registers_nothing_fails(run_cells: RunCells) -> None:
    row = run_cells(faulty("shows_nothing")).trials.iloc[0]
    assert row["status"] == "failed"
    assert "job.register" in row["reason"]


def test_without_a_reference_nothing_is_ranked(run_cells: RunCells) -> None:
    """The reference cannot be written, because a file blocks its folder."""
    from harness.analysis.summary import cells
    from harness.host.folders import cache_folder

    references = cache_folder() / "references"
    references.mkdir(exist_ok=True)
    references.rename(references.with_name("moved"))
    references.write_text("in the way")
    try:
        trials = run_cells(cell("ddp", seed=7)).trials
    finally:
        references.unlink()
        references.with_name("moved").rename(references)
    assert trials.iloc[0]["parity_verdict"] == "unknown"
    assert trials.iloc[0]["reason"].startswith(
        "not verified, so not ranked: the reference run ended failed"
    )
    assert not cells(trials)["ranked"].any()


def test_children_of_ranks_are_gone(run_cells: RunCells) -> None:
    """A process that a rank starts in its own session does not outlive the trial."""
    marker = "time.sleep(3600)"
    assert run_cells(faulty("leaves_children")).trials.iloc[0]["status"] == "ok"
    left = [
        p
        for p in psutil.process_iter(["cmdline"])
        if any(marker in word for word in p.info["cmdline"] or [])
    ]
    assert left == []


def test_the_trials_folder_is_removed(run_cells: RunCells, monkeypatch: pytest.MonkeyPatch) -> None:
    # A short name, because the path of a socket may have at most 107 characters.
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        run_cells(faulty("raises"), cell("ddp"))
        assert [p for p in os.listdir(folder) if p.startswith("parallelism-bench-")] == []


def test_a_stop_is_recorded_as_interrupted(launcher: Launcher) -> None:
    """SIGINT to the launching process while ranks train ends them, and the outcome is
    interrupted."""
    workload = make_workload("llama-nano")
    hanging = faulty("hangs", time_limit_seconds=30)
    threading.Timer(3, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    outcome = launcher.run(hanging, prepare_data("stdlib", workload, 32), 2)
    assert outcome.status == "interrupted"
    assert time.monotonic() - begin < 15


def test_many_launches_in_a_row(launcher: Launcher) -> None:
    """No launch hangs. Set BENCH_LAUNCHES=500 for the long version."""
    short = cell("ddp", warmup_steps=1, timed_steps=1, parity_steps=1, time_limit_seconds=20)
    data = prepare_data("stdlib", make_workload("llama-nano"), 32)
    for _ in range(int(os.environ.get("BENCH_LAUNCHES", "12"))):
        outcome = launcher.run(short, data, 2)
        assert (outcome.status, outcome.reason) == ("ok", "")
        # The step after the parity check is timed if no other step can be.
        assert [step.phase for step in outcome.trained[0].steps] == ["warmup", "timed"]


def test_a_fork_server_that_was_killed_just_before_a_trial_is_replaced(
    run_cells: RunCells, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The killed server still seems to run. Python's own replacement lacks this suite's
    settings."""
    os.kill(launcher.fork_server, signal.SIGKILL)
    monkeypatch.setattr(launcher, "_fork_server_runs", lambda: True)
    row = run_cells(cell("ddp")).trials.iloc[0]
    assert (row["status"], row["reason"]) == ("ok", "")


def test_a_fork_server_that_no_longer_listens_is_replaced(
    run_cells: RunCells, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed server that has closed its socket but not yet ended looks alive to Python."""
    former, run_ranks = launcher.fork_server, launcher._run_ranks

    def refused_once(*arguments: object) -> object:
        if launcher.fork_server == former:
            raise ConnectionRefusedError("the fork server was killed")
        return run_ranks(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(launcher, "_run_ranks", refused_once)
    row = run_cells(cell("ddp")).trials.iloc[0]
    assert (row["status"], row["reason"]) == ("ok", "")
