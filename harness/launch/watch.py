"""Monitors a trial's ranks: progress, requests to stop, the time limit."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from harness.launch.hang import LOOK_SECONDS, Hang, Silence, ask_ranks
from harness.worker.spec import pid_file


def pids_by_rank(scratch: str, ranks: range) -> dict[int, int]:
    """Returns the process ids of ranks that have started."""
    files = {rank: pid_file(scratch, rank) for rank in ranks}
    return {r: int(text) for r, f in files.items() if f.exists() and (text := f.read_text())}


@contextlib.contextmanager
def listen(scratch: str, on_progress: Callable[[int, float], None] | None) -> Iterator[str | None]:
    """Yields the address of a socket for rank 0's progress."""
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
    """Ends the ranks when `stop` is set, repeatedly, since more may be starting."""
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


class Watch:
    """Ends the ranks at the time limit or on a hang, after asking for their stacks.

    `waited`: seconds that do not count. `other_nodes`, `on_gpus`: see Silence.
    """

    def __init__(
        self,
        scratch: str,
        ranks: range,
        seconds: float,
        kill: Callable[[], object],
        waited: Callable[[], float],
        other_nodes: bool = False,
        on_gpus: bool = False,
    ) -> None:
        self.scratch, self.ranks, self.seconds = scratch, ranks, seconds
        self.kill, self.waited = kill, waited
        self.passed = False
        """Whether the time limit was reached."""
        self.hang: Hang | None = None
        self._silence = Silence(
            scratch, ranks, lambda: pids_by_rank(scratch, ranks), other_nodes, on_gpus
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._wait, daemon=True)

    def __enter__(self) -> Watch:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _wait(self) -> None:
        looked, waited = time.monotonic(), self.waited()
        while (left := self.seconds + self.waited() - (time.monotonic() - self._began)) > 0:
            if self._over.wait(min(left, LOOK_SECONDS)):
                return
            now, waited_now = time.monotonic(), self.waited()
            self.hang = self._silence.look(max(0.0, now - looked - (waited_now - waited)))
            looked, waited = now, waited_now
            if self.hang:
                break
        self.passed = self.hang is None
        ask_ranks(self.scratch, pids_by_rank(self.scratch, self.ranks))
        self.kill()
