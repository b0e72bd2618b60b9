"""Acts at a moment of another thread or process, whenever that comes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

LONG = 900.0
"""Seconds after which nothing more is expected, even on half a busy core."""
PROMPT = 60.0
"""Seconds within which processes that need no work end, even on half a busy core."""


def until(
    holds: Callable[[], object],
    why: Callable[[], str] | str = "never held",
    within: float = LONG,
) -> None:
    """Waits until a condition holds; after `within` seconds, fails with the text of `why`."""
    deadline, pause = time.monotonic() + within, 0.02
    while not holds():
        assert time.monotonic() < deadline, why() if callable(why) else why
        time.sleep(pause)
        pause = min(1.1 * pause, 0.2)


@contextlib.contextmanager
def when(holds: Callable[[], object], act: Callable[[], object]) -> Iterator[None]:
    """Acts once a condition holds, in another thread."""

    def wait() -> None:
        until(holds)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    yield
    thread.join()


def at_first_step(act: Callable[[], object]) -> Callable[[int, float], None]:
    """Returns a listener to a launch's steps that acts at the first one."""
    acted: list[object] = []

    def listen(step: int, seconds: float) -> None:
        if not acted:
            acted.append(step)
            act()

    return listen


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
