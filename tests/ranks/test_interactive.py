"""The Python interface without a main file: in a Jupyter kernel and on standard input.

Rank processes start from the caller's main module, which interactive interpreters lack.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.waiting import PROMPT, until

ROOT = Path(__file__).parents[2]
SETTINGS = ("TORCHINDUCTOR_CACHE_DIR", "TOKENIZERS_PARALLELISM")
"""Variables that torch and the launcher set for this process's later runs."""
SETUP = """
import json, os, threading, psutil, bench
cell = {"strategy": "ddp", "devices": 2, "workload": "llama-nano"}
cell |= {"warmup_steps": 1, "timed_steps": 2, "parity_steps": 3}
def processes():
    return {f"{c.pid} {' '.join(c.cmdline())}" for c in psutil.Process().children(True)}

def state(): return [set(os.environ.items()), set(threading.enumerate()), processes()]

before = state()
"""
RUN = """
results = bench.run([cell], trials=1, timed_seconds=0.0)
"""
CHECK = """
left = [[str(n) for n in new - old] for new, old in zip(state(), before)] + [os.listdir()]
found = [results.trials["status"].tolist(), results.cells["parity_verdict"].tolist()]
print(json.dumps([*found, left]))
"""
NOTEBOOK = """
import json, sys
import nbformat
from nbclient import NotebookClient

cells = [nbformat.v4.new_code_cell(code) for code in json.load(sys.stdin)]
notebook = nbformat.v4.new_notebook(cells=cells)
NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
print(json.dumps([cell.outputs for cell in notebook.cells]))
"""


def execute(folder: Path, words: list[str], given: str) -> tuple[str, str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, *words],
        input=given,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


def require_tidy(printed: str) -> None:
    statuses, verdicts, (variables, threads, processes, files) = json.loads(printed)
    assert (statuses, verdicts) == (["ok"], ["exact"])
    assert (threads, files) == ([], ["results"])
    assert [v for v in variables if not any(name in v for name in SETTINGS)] == []
    # Two processes stay for the next run and end with the interpreter.
    assert len(processes) == 2
    assert all("multiprocessing" in process for process in processes)
    started = [int(process.split()[0]) for process in processes]
    until(lambda: not any(map(runs, started)), within=PROMPT)


def runs(pid: int) -> bool:
    """Returns whether a process runs; a zombie that this process adopted does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.thorough
def test_statements_on_standard_input_can_launch_a_run(tmp_path: Path) -> None:
    printed, prompts = execute(tmp_path, ["-i", "-q"], SETUP + RUN + CHECK)
    require_tidy(printed)
    assert prompts.replace(">>>", "").replace("...", "").strip() == "", "progress is silent"


@pytest.mark.thorough
def test_cells_of_a_jupyter_kernel_can_launch_a_run(tmp_path: Path) -> None:
    if not (find_spec("nbclient") and find_spec("ipykernel")):
        pytest.skip("packages nbclient and ipykernel are not installed")
    printed, _ = execute(tmp_path, ["-c", NOTEBOOK], json.dumps([SETUP, RUN, RUN, CHECK]))
    setup, first, second, (last,) = json.loads(printed.splitlines()[-1])
    assert (setup, first, second) == ([], [], []), "progress is silent"
    require_tidy(last["text"])
