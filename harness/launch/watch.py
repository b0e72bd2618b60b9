"""What goes on beside the ranks of a trial while the launcher waits for them: their progress is
heard, they are ended on request, and at the time limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from harness.worker.spec import pid_file


def rank_pids(scratch: str, ranks: range) -> list[int]:
    """Process ids of those of these ranks that have started."""
    files = [pid_file(scratch, rank) for rank in ranks]
    return [int(text) for f in files if f.exists() and (text := f.read_text())]


@contextlib.contextmanager
def listen(scratch: str, on_progress: Callable[[int, float], None] | None) -> Iterator[str | None]:
    """A socket on which rank 0 tells of its steps; the thread that reads it sleeps in between."""
    if on_progress is None:
        yield None
        return
    address = str(Path(scratch) / "progress")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)

        def read() -> None:
            while message := listener.recv(1024):
                if message == b"stop":
                    return
                progress = json.loads(message)
                on_progress(progress["step"], progress["seconds"])

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield address
        finally:
            listener.connect(address)
            listener.send(b"stop")
            thread.join()


@contextlib.contextmanager
def ended_by(stop: threading.Event | None, kill: Callable[[], object]) -> Iterator[None]:
    """Ends the ranks when `stop` is set; again until all is over, because more of them may be about
    to start."""
    if stop is None:
        yield
        return
    over = threading.Event()

    def wait() -> None:
        stop.wait()
        while not over.is_set():
            kill()
            over.wait(0.1)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        stop.set()
        thread.join()


class Deadline:
    """At the time limit: asks each rank for its stacks, then kills them all.

    `waited`: seconds so far that do not count.
    """

    def __init__(
        self,
        scratch: str,
        ranks: range,
        seconds: float,
        kill: Callable[[], object],
        waited: Callable[[], float],
    ) -> None:
        self.scratch, self.ranks, self.seconds, self.kill, self.waited = (
            scratch,
            ranks,
            seconds,
            kill,
            waited,
        )
        self.passed = False
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._wait, daemon=True)

    def __enter__(self) -> Deadline:
        self.began = time.monotonic()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def _wait(self) -> None:
        while (left := self.seconds + self.waited() - (time.monotonic() - self.began)) > 0:
            if self.over.wait(left):
                return
        self._strike()

    def _strike(self) -> None:
        self.passed = True
        for pid in rank_pids(self.scratch, self.ranks):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        self.kill()
