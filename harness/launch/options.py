"""Options of a launcher's caller."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from harness.worker.interleave import TimeSlices

Command = Callable[[Path], "list[str] | None"]


class TrialOptions(TypedDict, total=False):
    """Fields of TrialSpec for a launcher's caller."""

    reference: str | None
    reference_output: str | None
    max_restarts: int
    profile: bool
    traces: str | None
    turns: TimeSlices | None
    samples_per_control: int
    timed_seconds: float
    rewind_seed: int | None


class LaunchOptions(TrialOptions, total=False):
    command: Command
    """The strategy's own command, see `Strategy.own_launcher`."""
