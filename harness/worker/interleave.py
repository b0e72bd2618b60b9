"""What a rank does whose launch trains by turns with others (see harness/launch/interleaved.py)."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

CYCLES_IN_A_TURN = 2
"""The shorter a turn, the closer its neighbours in time: docs/studies/statistical-power.md compares
turns of 2, 5, 10 and 20 steps."""


@dataclass(frozen=True)
class TimeSlices:
    """What a rank is told of them; part of TrialSpec."""

    address: str
    """Of the socket at which they are given."""
    steps: int
    """Timed steps in each; a settling one goes before them."""

    @classmethod
    def of(cls, address: str, cycle: int) -> TimeSlices:
        """`cycle`: steps after which the strategy's work repeats."""
        return cls(address, CYCLES_IN_A_TURN * cycle)

    def begins(self, number: int) -> bool:
        """Whether a turn begins with this step, counted from the first one after the warm-up,
        settling ones included."""
        return number >= 0 and number % (self.steps + 1) == 0


class Place:
    """A rank's place among those that take turns."""

    def __init__(self, address: str) -> None:
        self.line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.connect(address)

    def wait(self, step: int, seconds: float) -> float:
        """Gives the turn away and waits for the next; returns when that begins, in seconds after
        the epoch.

        `step` and `seconds`: the last step and its time, for the progress that is shown.
        Raises ConnectionError where nobody gives turns any more.
        """
        self.line.send(f"{os.getpid()} {step} {seconds}".encode())
        if not self.line.recv(8):
            raise ConnectionError("the run that gives the turns is gone")
        return time.time()
