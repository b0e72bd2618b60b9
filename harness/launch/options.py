"""What a caller of a launcher may set beside the cell, its data and the number of processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from harness.worker.interleave import TimeSlices

Command = Callable[[Path], "list[str] | None"]


class TrialOptions(TypedDict, total=False):
    """The fields of TrialSpec that a caller of a launcher may set, see there."""

    reference: str | None
    reference_output: str | None
    max_restarts: int
    profile: bool
    traces: str | None
    turns: TimeSlices | None
    samples_per_control: int
    timed_seconds: float
    set_back_seed: int | None


class LaunchOptions(TrialOptions, total=False):
    """All that a caller of a launcher may set, the strategy's command with it."""

    command: Command
    """The strategy's own command line for a folder, see `Strategy.own_launcher`."""
