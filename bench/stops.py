"""SIGINT and SIGTERM, at any moment of a command."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from types import FrameType

INTERRUPTED = (
    "bench: interrupted; recorded trials are kept, and python -m bench run --resume continues a run"
)


class Stop:
    """Turns the first SIGINT or SIGTERM into KeyboardInterrupt, and ignores others."""

    def __init__(self) -> None:
        self.requested = False
        sys.unraisablehook = self._unraisable
        atexit.register(self._leave)  # first, so it is called last
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._request)

    def end(self) -> None:
        """Ignores signals from now on, also while Python itself ends, which only keeps SIG_IGN."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    def _leave(self) -> None:
        """Ends an interrupted process. Python would kill it by SIGINT if the interrupt came from
        text that was executed, as in many imports."""
        if self.requested:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(130)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = True
            raise KeyboardInterrupt

    def _unraisable(self, raised: sys.UnraisableHookArgs) -> None:
        """Interrupts again if the interrupt was lost in a destructor or a callback."""
        if not issubclass(raised.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(raised)
            return
        self.requested = False
        os.kill(os.getpid(), signal.SIGINT)
