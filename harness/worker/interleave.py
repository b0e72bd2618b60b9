"""A rank's side of interleaved trials (see harness/launch/interleaved.py)."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

CYCLES_IN_A_TURN = 2
"""Cycles per turn: shorter turns are closer in time to their neighbours.
docs/studies/statistical-power.md compares turns of 2, 5, 10 and 20 steps."""


@dataclass(frozen=True)
class TimeSlices:
    address: str
    """Address of the socket that grants turns."""
    steps: int
    """Number of timed steps per slice, after a settling one."""

    @classmethod
    def of(cls, address: str, cycle: int) -> TimeSlices:
        """Builds the slices; `cycle`: steps after which the strategy's work repeats."""
        return cls(address, CYCLES_IN_A_TURN * cycle)

    def begins(self, number: int) -> bool:
        """Returns whether a turn begins with this step.

        `number`: counted from the first step after the warm-up, including settling ones.
        """
        return number >= 0 and number % (self.steps + 1) == 0


class Place:
    """Connection to the process that grants turns."""

    def __init__(self, address: str) -> None:
        self.line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.connect(address)

    def wait(self, step: int, seconds: float) -> float:
        """Ends the turn and waits for the next; returns its start in seconds after the epoch.

        `step` and `seconds`: the last step and its time, for the progress display. Raises
        ConnectionError if nobody grants turns any more.
        """
        self.line.send(f"{os.getpid()} {step} {seconds}".encode())
        if not self.line.recv(8):
            raise ConnectionError("the run that gives the turns is gone")
        return time.time()
