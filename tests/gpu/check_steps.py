"""Probes for test_gpu_check.py, which succeed, die or hang. Each start appends the process id to
the probe's file in the folder `$CHECK_STEPS`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.gpu_check.probes.finding import ProbeFinding

FOLDER = "CHECK_STEPS"


def begun(name: str, folder: Path) -> list[int]:
    """Returns a probe's process ids, one for each time that it started."""
    file = folder / name
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def note(name: str) -> Path:
    folder = Path(os.environ[FOLDER])
    with open(folder / name, "a") as file:
        file.write(f"{os.getpid()}\n")
    return folder


def holds(device: str) -> ProbeFinding:
    note("holds")
    return ProbeFinding.of(True, "it holds", {"device": device})


def dies(device: str) -> ProbeFinding:
    note("dies")
    print("the last thing it said", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def hangs(device: str) -> ProbeFinding:
    """Ignores SIGTERM and has a child in its group, unless the file `free` exists."""
    folder = note("hangs")
    if (folder / "free").exists():
        return ProbeFinding.of(True, "it was let go", None)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(folder / "children", "a") as file:
        file.write(f"{child.pid}\n")
    time.sleep(600)
    raise AssertionError


def waits(device: str) -> ProbeFinding:
    note("waits")
    time.sleep(600)
    raise AssertionError


def trains_nothing(device: str) -> ProbeFinding:
    """Fails unless the file `fixed` exists."""
    folder = note("gate")
    return ProbeFinding.of((folder / "fixed").exists(), "it trains", None)
