"""`make bench` keeps the figures of finished benchmarks when it is interrupted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCHMARKS = """
def test_finished(benchmark, ratio):
    benchmark.pedantic(int, rounds=1)
    ratio("finished", [2.0], "at least 1")

def interrupt():
    raise KeyboardInterrupt

def test_interrupted(benchmark):
    benchmark.pedantic(interrupt, rounds=1)
"""


def test_figures_of_finished_benchmarks_survive_an_interrupt(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "benchmarks" / "conftest.py", tmp_path)
    (tmp_path / "test_made.py").write_text(BENCHMARKS)
    # pytest-benchmark measures nothing in a worker of pytest-xdist.
    outside = {name: os.environ[name] for name in os.environ if not name.startswith("PYTEST_")}
    options = ["--rootdir", str(tmp_path), "-p", "no:cacheprovider", "--benchmark-only"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(tmp_path), *options, "--benchmark-json", "out.json"],
        cwd=tmp_path,
        env=outside | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, "interrupted"
    assert "Traceback" not in done.stdout + done.stderr
    assert "finished  2.000" in done.stdout
    (only,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert only["name"] == "test_finished"
    assert only["extra_info"]["ratios"][0]["median"] == 2.0
