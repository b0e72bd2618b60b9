"""Runs a step's process with a time limit, and leaves no process behind.

`python -m bench.gpu_check.limited_process CORES MODULE WORDS...` becomes `python -m MODULE
WORDS...` on these cores, and ends with its parent. A check has threads, so running Python between
fork and exec would be unsafe.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from harness.host.process import die_with_parent

ROOT = Path(__file__).parents[2]
STOP_SECONDS = 20.0
"""Seconds from SIGTERM to SIGKILL."""
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Limits:
    seconds: float
    stop_seconds: float = STOP_SECONDS
    cores: tuple[int, ...] = ()
    """Allowed cores; empty: all."""


@dataclass(frozen=True)
class ProcessEnd:
    exit_code: int | None
    """Negative: ended by a signal from elsewhere; None: it had to be stopped."""
    seconds: float


def run_limited(
    words: Sequence[str],
    log: Path,
    limits: Limits,
    stop: Event,
    variables: Mapping[str, str] | None = None,
) -> ProcessEnd:
    """Runs `python -m WORDS`, logging to LOG.out and LOG.err, until it ends, exceeds its limit, or
    `stop` is set.

    Stops its group by SIGTERM, then SIGKILL.
    """
    began = time.monotonic()
    cores = ",".join(map(str, limits.cores))
    command = [sys.executable, "-m", "bench.gpu_check.limited_process", cores, *words]
    with open(f"{log}.out", "wb") as out, open(f"{log}.err", "wb") as error:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=error,
            start_new_session=True,
            cwd=ROOT,
            env={**os.environ, **(variables or {})},
        )
    try:
        if _wait(process, began + limits.seconds, stop):
            return ProcessEnd(process.returncode, time.monotonic() - began)
        process.send_signal(signal.SIGTERM)
        _wait(process, time.monotonic() + limits.stop_seconds)
        return ProcessEnd(None, time.monotonic() - began)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], deadline: float, stop: Event | None = None) -> bool:
    """Returns whether the process ended before `deadline` (time.monotonic) and `stop`."""
    while process.poll() is None:
        if time.monotonic() >= deadline or (stop is not None and stop.is_set()):
            return False
        time.sleep(POLL_SECONDS)
    return True


def main(cores: str, *words: str) -> None:
    die_with_parent()
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.execv(sys.executable, [sys.executable, "-m", *words])


if __name__ == "__main__":
    main(*sys.argv[1:])
