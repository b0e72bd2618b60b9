"""kill -9 of a whole run at any moment, then --resume: nothing lost, nothing twice, nothing
unreadable, nothing left."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.record.store import Store

MATRIX = """
trials: 2
defaults: {workload: llama-nano, sequence_length: 32, batch: 8, warmup_steps: 1, timed_steps: 3}
cells:
  - {strategy: single}
  - {strategy: ddp, devices: [1, 2]}
  - {strategy: outside, devices: 2}
"""


def command(folder: Path, *words: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "bench",
        "run",
        "--results",
        str(folder / "results"),
        "--no-report",
        *words,
    ]


def ranks_of(marker: str) -> list[psutil.Process]:
    """Processes of this run, however they were reparented: they carry the marker in their
    environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("BENCH_TEST_MARKER") == marker:
                found.append(process)
        except psutil.Error:
            continue
    return found


def recorded(folder: Path) -> int:
    """Trials that the run has recorded so far."""
    return len(list((folder / "results" / "trials").rglob("*.parquet")))


@pytest.mark.parametrize(
    ("seed", "more"), [(0, ()), (1, ()), (2, ()), (3, ("--by-turns",))], ids=lambda v: str(v)
)
def test_kill_and_resume(tmp_path: Path, seed: int, more: tuple[str, ...]) -> None:
    """Killed three times: at its start, or up to half a second after so many trials were
    recorded."""
    matrix = tmp_path / "small.yaml"
    matrix.write_text(MATRIX)
    marker = f"{os.getpid()}-{seed}"
    environment = {**os.environ, "BENCH_TEST_MARKER": marker}
    words = ["--matrix", str(matrix), *more]
    chance = random.Random(seed)
    counts = sorted(chance.sample(range(7), 3))
    for attempt in range(4):
        # setsid: a group of its own, so that only this run is killed
        process = subprocess.Popen(
            command(tmp_path, *words),
            env=environment,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
        )
        if attempt < 3:
            deadline = time.monotonic() + 120
            while recorded(tmp_path) < counts[attempt] and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            time.sleep(chance.uniform(0.0, 0.5 if counts[attempt] else 5.0))
            process.kill()
        code = process.wait(timeout=240)
        deadline = time.monotonic() + 10
        while ranks_of(marker) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert ranks_of(marker) == []
        if (tmp_path / "results" / "runs").exists() and list(
            (tmp_path / "results" / "runs").glob("*.parquet")
        ):
            words = ["--matrix", str(matrix), "--resume"]
        if code == 0:
            break
    assert code == 0
    results = Store(tmp_path / "results").load()
    assert len(results.runs) == 1
    trials = results.trials
    assert sorted(trials.groupby("cell_id").size()) == [2, 2, 2, 2]
    assert not trials.duplicated(["cell_id", "trial"]).any()
    assert set(trials["status"]) == {"ok"}
    steps = results.steps.groupby(["cell_id", "trial", "rank"]).size()
    assert set(steps) == {6 if more else 4}, "by turns two more, which settle"


def test_a_finished_run_is_resumed_by_showing_it(tmp_path: Path) -> None:
    matrix = tmp_path / "small.yaml"
    matrix.write_text(
        "trials: 1\ndefaults: {workload: llama-nano, timed_steps: 3}\ncells: [{strategy: single}]"
    )
    for words in ([], ["--resume"]):
        done = subprocess.run(
            command(tmp_path, "--matrix", str(matrix), *words), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "ranked by throughput" in done.stdout
    assert len(Store(tmp_path / "results").load().trials) == 1


def test_nothing_to_resume_is_said(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path, "--resume"), capture_output=True, text=True)
    assert done.returncode == 2
    assert "nothing to resume" in done.stderr
    assert not (tmp_path / "results").exists()
