"""Progress reports of a rank."""

from __future__ import annotations

import contextlib
import json
import socket
import time


class Progress:
    """Reports finished steps to the parent at most twice a second, without blocking."""

    def __init__(self, address: str | None) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if address else None
        if self.socket:
            self.socket.setblocking(False)
        self.last = 0.0

    def tell(self, step: int, seconds: float) -> None:
        now = time.monotonic()
        if self.socket is None or self.address is None or now - self.last < 0.5:
            return
        self.last = now
        with contextlib.suppress(OSError):
            self.socket.sendto(
                json.dumps({"step": step, "seconds": seconds}).encode(), self.address
            )
