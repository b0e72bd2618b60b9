"""Probes for tests of the driver: they show something, die, or hang. `$CHECK_STEPS` names a folder
in which each leaves a line for each time that it began."""

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
    """The process ids of each time that a probe began."""
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
    """Ignores SIGTERM and has a child in its group, unless the file `free` is there."""
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
    """Fails, unless the file `fixed` is there."""
    folder = note("gate")
    return ProbeFinding.of((folder / "fixed").exists(), "it trains", None)
