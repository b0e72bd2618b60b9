"""A run killed at any moment by kill -9 resumes with no trial lost, repeated or unreadable.

It also leaves nothing behind. tests/cluster/test_chaos.py kills all processes of a run at random.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from bench.cli.run import run
from harness.record.store import Store
from tests.commands import ask
from tests.conftest import left_in
from tests.waiting import LONG, PROMPT, until

MATRIX = """
trials: 2
timed_seconds: 0.2
long_training: false
defaults: {workload: llama-nano, sequence_length: 32, batch: 8, warmup_steps: 1, timed_steps: 3}
cells:
  - {strategy: single}
  - {strategy: STRATEGIES, devices: 2}
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
    """Returns the processes with the marker in their environment, even if they were reparented."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("BENCH_TEST_MARKER") == marker:
                found.append(process)
        except psutil.Error:
            continue
    return found


def recorded(folder: Path) -> int:
    """Returns the number of trials that the run has recorded so far."""
    return len(list((folder / "results" / "trials").rglob("*.parquet")))


@pytest.mark.parametrize(
    "kills",
    [(3,), pytest.param((0, 1), marks=pytest.mark.thorough)],
    ids=["once", "twice"],
)
def test_a_killed_run_resumes(tmp_path: Path, kills: tuple[int, ...]) -> None:
    """Each kill comes within 0.5 s of the N-th recorded trial, or within 5 s of the run's start.

    Resuming a finished run shows its results.
    """
    matrix = tmp_path / "small.yaml"
    matrix.write_text(MATRIX.replace("STRATEGIES", "[ddp, outside]"))
    marker = f"{os.getpid()}-{tmp_path.name}"
    # A short name, because the path of a socket may have at most 107 characters.
    temporary = tempfile.TemporaryDirectory()
    environment = {**os.environ, "BENCH_TEST_MARKER": marker, "TMPDIR": temporary.name}
    words = ["--matrix", str(matrix), "--trials", "2"]
    chance = random.Random(len(kills))
    said = tmp_path / "said"
    for count in (*kills, None):
        # setsid: its own process group, so that only this run is killed
        with open(said, "w") as out:
            process = subprocess.Popen(
                command(tmp_path, *words), env=environment, start_new_session=True, stdout=out
            )
        if count is not None:
            until(lambda n=count, p=process: recorded(tmp_path) >= n or p.poll() is not None)
            time.sleep(chance.uniform(0.0, 0.5 if count else 5.0))
            process.kill()
        code = process.wait(timeout=LONG)
        until(lambda: not ranks_of(marker), within=PROMPT)
        if (tmp_path / "results" / "runs").exists() and list(
            (tmp_path / "results" / "runs").glob("*.parquet")
        ):
            words = ["--matrix", str(matrix), "--resume"]
        assert code == (0 if count is None else -signal.SIGKILL)
    with temporary as folder:
        assert left_in(folder) == [], "the last run must remove the killed runs' files"
    assert "throughput" in said.read_text()
    code, printed = ask(run, *command(tmp_path, *words)[4:])
    assert code == 0
    assert "throughput" in printed
    results = Store(tmp_path / "results").load()
    assert len(results.runs) == 1
    trials = results.trials
    assert sorted(trials.groupby("cell_id").size()) == [2] * 3
    assert not trials.duplicated(["cell_id", "trial"]).any()
    assert set(trials["status"]) == {"ok"}
    steps = results.steps.groupby(["cell_id", "trial", "rank"]).size()
    assert min(steps) >= 4, "steps for a fifth of a second"


def test_nothing_to_resume_is_an_error(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path, "--resume"), capture_output=True, text=True)
    assert done.returncode == 2
    assert str(tmp_path / "results") in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "results").exists()
