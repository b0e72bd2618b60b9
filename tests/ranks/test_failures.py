"""Failures are recorded with their first cause, the matrix goes on, and no process is left."""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import signal
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.launch.launcher import Launcher
from harness.launch.watch import Hang, Silence
from harness.workloads import make_workload, prepare_data
from tests.ranks.conftest import Row, RunCells, cell, check_rows, row
from tests.unit.test_cli import here
from tests.waiting import LONG, at_first_step, interrupt

fails = partial(row, "failed")


def faulty(fault: str, **axes: object):
    return cell("faulty", options={"fault": fault}, **axes)


PLANTED, KILLED = "ValueError: the planted mistake", "was killed by SIGKILL"
FAILURES: dict[str, list[Row]] = {
    "data parallelism by hand": [
        fails("faulty", {"fault": "raises"}, f"rank 1: {PLANTED}"),
        fails("faulty", {"fault": "raises_in_setup"}, f"rank 1: {PLANTED} in setup"),
        fails("faulty", {"fault": "killed"}, f"rank 1 {KILLED}", launcher="elastic"),
        fails("faulty", {"fault": "killed"}, f"rank 1 {KILLED}", launcher="spawn"),
        fails("faulty", {"fault": "exits"}, "rank 1 exited with code 0"),
        fails("faulty", {"fault": "shows_nothing"}, "job.register"),
        row("diverged", "faulty", {"fault": "nan"}, "not finite at step 2"),
        row("exact", "faulty", {"fault": "leaves_children"}),
        row("exact", "ddp", memory_limit_bytes=512 * 2**20),
    ],
    "parameter server": [
        fails("parameter_server_faulty", {"fault": fault, "rank": rank}, f"rank {rank}{cause}")
        for fault, cause in (("raises", f": {PLANTED}"), ("killed", f" {KILLED}"))
        for rank in (0, 2)
    ],
    "horovod": [
        fails("horovod_faulty", {"fault": "raises"}, f"rank 1: {PLANTED}"),
        fails("horovod_faulty", {"fault": "killed"}, f"rank 1 {KILLED}"),
    ],
}


@pytest.mark.parametrize("subject", FAILURES)
def test_each_failure_is_recorded_with_its_first_cause(
    run_cells: RunCells, monkeypatch: pytest.MonkeyPatch, subject: str
) -> None:
    """The other cells train, and no folder and no process is left, even one that a rank started in
    its own session."""
    # A short name, because the path of a socket may have at most 107 characters.
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        trials = check_rows(run_cells, FAILURES[subject])
        assert [p for p in os.listdir(folder) if p.startswith("parallelism-bench-")] == []
    for one, trial in zip(FAILURES[subject], trials, strict=True):
        if one.outcome == "failed":
            assert trial["reason"].startswith(one.reason) or one.reason == "job.register"
        if PLANTED in one.reason:
            assert "Traceback" in trial["log_tail"]
            assert "bench_plugin/" in trial["log_tail"]
    running = [word for p in psutil.process_iter(["cmdline"]) for word in p.info["cmdline"] or []]
    assert not any("time.sleep(3600)" in word for word in running)


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
    row = run_cells(faulty("hangs", time_limit_seconds=LONG)).trials.iloc[0]
    assert row["status"] == "timeout"
    assert row["reason"].startswith("hangs: ")
    assert "in step 2; rank 1 never entered gloo:all_reduce" in row["reason"]
    assert "rank 0:" in row["stacks"]
    assert "faulty.py" in row["stacks"].partition("rank 1:")[2]
    assert row["wall_seconds"] < LONG / 2


def test_no_hang_is_noticed_while_processes_are_cleaned_up(
    run_cells: RunCells, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaning, wait = threading.Event(), psutil.wait_procs

    def clean_up(*asked: Any, **more: Any) -> object:
        cleaning.set()
        time.sleep(1.5)  # the time of three looks
        cleaning.clear()
        return wait(*asked, **more)

    def look(silence: Silence, passed: float) -> Hang | None:
        return Hang(16, {1: "step 2"}) if cleaning.is_set() else None

    monkeypatch.setattr("psutil.wait_procs", clean_up)
    monkeypatch.setattr(Silence, "look", look)
    row = run_cells(faulty("killed")).trials.iloc[0]
    assert row["reason"].startswith("rank 1 was killed by SIGKILL")


def test_a_timeout_also_ends_ranks_that_torch_restarts(launcher: Launcher) -> None:
    """Torch's elastic agent restarts ranks that were killed, as in cells of `ddp_elastic`."""
    hanging = faulty("hangs", time_limit_seconds=8)
    data = prepare_data(hanging.data, make_workload(hanging.workload), hanging.sequence_length)
    outcome = launcher.run(hanging, data, 2, max_restarts=3)
    assert outcome.status == "timeout", outcome.reason
    assert outcome.wall_seconds < LONG / 2


def test_out_of_memory_under_a_limit_is_recorded(run_cells: RunCells) -> None:
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
    assert trials.iloc[0]["reason"].startswith("not verified: the reference run ended failed")
    assert not cells(trials)["ranked"].any()


def test_a_stop_is_recorded_as_interrupted(
    launcher: Launcher, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """SIGINT to the launching process while ranks train ends them, and the outcome is
    interrupted; torch adds no warning of its own."""
    workload = make_workload("llama-nano")
    data = prepare_data("stdlib", workload, 32)
    hanging = faulty("hangs", time_limit_seconds=LONG)
    outcome = launcher.run(hanging, data, 2, on_progress=at_first_step(interrupt))
    assert outcome.status == "interrupted"
    assert "death signal" not in capfd.readouterr().err + caplog.text


def test_many_launches_in_a_row_succeed(launcher: Launcher) -> None:
    """No launch hangs. Set BENCH_LAUNCHES=500 for the long version."""
    short = cell("ddp", warmup_steps=1, timed_steps=1, parity_steps=1)
    data = prepare_data("stdlib", make_workload("llama-nano"), 32)
    for _ in range(int(os.environ.get("BENCH_LAUNCHES", "4"))):
        outcome = launcher.run(short, data, 2)
        assert (outcome.status, outcome.reason) == ("ok", "")
        # The step after the parity check is timed if no other step can be.
        assert [step.phase for step in outcome.trained[0].steps] == ["warmup", "timed"]


@pytest.mark.thorough
def test_a_fork_server_that_was_killed_just_before_a_trial_is_replaced(
    run_cells: RunCells, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The killed server still seems to run. Python's own replacement lacks this suite's
    settings."""
    os.kill(launcher.fork_server, signal.SIGKILL)
    monkeypatch.setattr(launcher, "_fork_server_runs", lambda: True)
    row = run_cells(cell("ddp")).trials.iloc[0]
    assert (row["status"], row["reason"]) == ("ok", "")


@pytest.mark.thorough
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


def test_a_divergence_is_exit_code_1_and_an_expected_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(
        "trials: 1\ntimed_seconds: 0\n"
        "defaults: {workload: llama-nano, devices: 2, timed_steps: 3}\ncells:"
        " [{strategy: broken, options: {mistake: clipping}}]"
    )
    command = ("run", "--matrix", "bad.yaml", "--no-report")
    done = here(*command, "--json", folder=tmp_path)
    assert done.returncode == 1
    assert json.loads(done.stdout)["cells"][0]["status"] == "diverged"
    expected = here(*command, "--set", "expect=diverged", folder=tmp_path)
    assert expected.returncode == 0
    assert "as expected" in expected.stdout
