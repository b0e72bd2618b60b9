"""kill -9 of a whole run at any moment, then --resume: nothing lost, nothing twice, nothing
unreadable, nothing left. Random kills of all that belongs to a run: tests/cluster/test_chaos.py."""

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

MATRIX = """
trials: 2
timed_seconds: 0.2
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
    ("strategies", "more", "kills"),
    [
        ("[ddp, outside]", (), (3,)),
        ("ddp", ("--interleave",), (1,)),
        pytest.param("[ddp, outside]", (), (0, 1), marks=pytest.mark.thorough),
    ],
    ids=["one after the other", "by turns", "twice"],
)
def test_kill_and_resume(
    tmp_path: Path, strategies: str, more: tuple[str, ...], kills: tuple[int, ...]
) -> None:
    """Killed up to half a second after so many trials were recorded, or at its start. What is
    finished is resumed by showing it.

    By turns the first of two is recorded just before the second.
    """
    matrix = tmp_path / "small.yaml"
    matrix.write_text(MATRIX.replace("STRATEGIES", strategies))
    marker = f"{os.getpid()}-{tmp_path.name}"
    # A short name: the path of a socket in it may have 107 characters.
    temporary = tempfile.TemporaryDirectory()
    environment = {**os.environ, "BENCH_TEST_MARKER": marker, "TMPDIR": temporary.name}
    words = ["--matrix", str(matrix), "--trials", "2", *more]
    chance = random.Random(len(kills))
    said = tmp_path / "said"
    for count in (*kills, None):
        # setsid: a group of its own, so that only this run is killed
        with open(said, "w") as out:
            process = subprocess.Popen(
                command(tmp_path, *words), env=environment, start_new_session=True, stdout=out
            )
        if count is not None:
            deadline = time.monotonic() + 120
            while recorded(tmp_path) < count and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            time.sleep(chance.uniform(0.0, 0.5 if count else 5.0))
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
        assert code == (0 if count is None else -signal.SIGKILL)
    with temporary as folder:
        assert left_in(folder) == [], "the last run removes what the killed ones left"
    assert "throughput" in said.read_text()
    code, shown = ask(run, *command(tmp_path, *words)[4:])
    assert code == 0
    assert "throughput" in shown
    results = Store(tmp_path / "results").load()
    assert len(results.runs) == 1
    trials = results.trials
    assert sorted(trials.groupby("cell_id").size()) == [2] * (2 if more else 3)
    assert not trials.duplicated(["cell_id", "trial"]).any()
    assert set(trials["status"]) == {"ok"}
    steps = results.steps.groupby(["cell_id", "trial", "rank"]).size()
    if more:
        assert set(steps) == {6}, "two more than the matrix says, which settle"
    else:
        assert min(steps) >= 4, "as many as take a fifth of a second"


def test_nothing_to_resume_is_said(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path, "--resume"), capture_output=True, text=True)
    assert done.returncode == 2
    assert str(tmp_path / "results") in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "results").exists()
