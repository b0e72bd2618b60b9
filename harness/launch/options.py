"""Options of a launcher in addition to the cell, its data and the number of processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from harness.worker.interleave import TimeSlices

Command = Callable[[Path], "list[str] | None"]


class TrialOptions(TypedDict, total=False):
    """Fields of TrialSpec that a launcher's caller may set."""

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
    """All options of a launcher, including the strategy's command."""

    command: Command
    """Returns the strategy's own command line for a folder, see `Strategy.own_launcher`."""
