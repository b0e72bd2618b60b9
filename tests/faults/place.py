"""Where faults are injected, and what a fault is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness.launch.launcher import Launcher
from harness.record.plan import Plan
from harness.record.store import Store
from harness.run.runner import Runner, SilentListener
from harness.spec.cell import Cell


@dataclass
class Place:
    """Where faults are injected."""

    store: Store
    launcher: Launcher
    chance: random.Random
    temporary: Path
    """The folder for temporary files of runs that are processes of their own."""
    taken_out: set[str] = field(default_factory=set)
    """Names of trial files that a fault damaged, which were then quarantined."""

    def trial(self, tried: Cell) -> tuple[str, str]:
        """Runs a cell once, as a run of its own; returns its status and reason."""
        plan = Plan.new("campaign", [tried], 1, [])
        runner = Runner(self.store, plan, launcher=lambda packages: self.launcher)
        runner.begin()
        assert runner.run(SilentListener())
        trial = self.store.load([plan.run_id], steps=False).trials.iloc[0]
        return str(trial["status"]), str(trial["reason"])

    def files(self) -> list[Path]:
        """Of all trials that are recorded."""
        return sorted((self.store.folder / "trials").glob("*/*.parquet"))


Inject = Callable[[Place], None]
"""Injects a fault, and raises AssertionError where what follows is not what has to."""
