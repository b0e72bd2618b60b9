"""Two runs write to one results folder while a third process reads it. All trials read before must
stay there, intact and only once. ROUNDS=200 writes 200 trials in each run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from harness.record.store import Store, check_folder
from tests.faults.writer import GATHERS_EVERY, SHARED, STEPS

ROUNDS = int(os.environ.get("ROUNDS", "20"))
RUNS = ("run-a", "run-b")


def read_once(store: Store, seen: dict[str, int]) -> bool:
    """Reads the folder; returns False before the first run has begun. Raises AssertionError if
    something is missing, damaged or duplicated; warnings about damaged files are errors here.
    `seen`: trials by run at the last look, updated."""
    if not (begun := store.run_ids()):
        return False
    results = store.load()
    assert {row["run_id"] for row in store.newest_rows()} >= set(begun)
    keys = ["run_id", "cell_id", "trial", "attempt"]
    assert not results.trials.duplicated(keys).any()
    steps = Counter(zip(results.steps["run_id"], results.steps["trial"], strict=True))
    for run_id, trials in results.trials.groupby("run_id"):
        count = seen.get(str(run_id), 0)
        # Trials appear in the order in which they were written, without gaps.
        assert sorted(trials["trial"]) == list(range(len(trials)))
        assert len(trials) >= count
        assert len(store.ended_trials(str(run_id))) >= len(trials)
        seen[str(run_id)] = len(trials)
        assert {steps[run_id, trial] for trial in trials["trial"]} == {STEPS}
    return True


@pytest.mark.timeout(120 + 2 * ROUNDS)
def test_two_writers_and_a_reader_never_disturb_each_other(tmp_path: Path) -> None:
    store, seen, looks = Store(tmp_path / "results"), dict[str, int](), 0
    words = [sys.executable, "-m", "tests.faults.writer", str(store.folder)]
    writers = [subprocess.Popen([*words, run_id, str(ROUNDS)]) for run_id in RUNS]
    try:
        while any(writer.poll() is None for writer in writers):
            looks += read_once(store, seen)
            time.sleep(0.01)
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    assert [writer.returncode for writer in writers] == [0, 0]
    read_once(store, seen)
    print(f"{looks} looks while {ROUNDS} trials were written in each of {len(RUNS)} runs")
    assert seen == dict.fromkeys(RUNS, ROUNDS)
    assert looks > 2
    concluded = store.load(steps=False).conclusions["run_id"].value_counts().to_dict()
    each = ROUNDS // GATHERS_EVERY
    assert concluded == {SHARED: 2 * each, **dict.fromkeys(RUNS, each)}
    assert check_folder(store).problems == ()
    assert [file for file in store.folder.rglob(".*") if file.is_file()] == []  # half-written
