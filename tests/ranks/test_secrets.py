"""A secret in ranks' logs and errors is neither written to a file nor shown."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from harness.record.store import Store
from tests.conftest import ROOT, left_in
from tests.ranks.test_resume import command

SECRET = "pl4nted-8f2c1d"


def test_a_planted_secret_is_nowhere(tmp_path: Path) -> None:
    matrix = tmp_path / f"{SECRET}.yaml"
    matrix.write_text(
        "trials: 1\ntimed_seconds: 0\n"
        "defaults: {workload: llama-nano, devices: 2, batch: 8, timed_steps: 3}\n"
        "cells: [{strategy: faulty, options: {fault: tells_secrets}}]\n"
    )
    with tempfile.TemporaryDirectory() as temporary:
        environment = {
            **os.environ,
            "PLANTED_TOKEN": SECRET,
            "TMPDIR": temporary,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]]),
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "remote.origin.url",
            "GIT_CONFIG_VALUE_0": f"https://me:{SECRET}@example.org/x.git",
        }
        words = command(tmp_path, "--matrix", str(matrix), "--json")
        words.remove("--no-report")
        done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True)
        left = left_in(temporary)
    assert left == []
    results = Store(tmp_path / "results").load()
    trial = results.trials.iloc[0]
    assert (trial["status"], trial["reason"]) == (
        "failed",
        "rank 1: ValueError: 401 for https://[redacted]@example.org?key=[redacted]",
    )
    assert "Traceback" in trial["log_tail"]
    assert SECRET not in "".join(frame.to_csv() for frame in vars(results).values())
    written = [file for file in tmp_path.rglob("*") if file.is_file() and file != matrix]
    assert any(file.suffix == ".html" for file in written)
    assert [file for file in written if SECRET.encode() in file.read_bytes()] == []
    assert SECRET not in (done.stdout + done.stderr).replace(str(matrix), "")
