"""Types of faults and of the place to inject them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness.cell.cell import Cell
from harness.launch.launcher import Launcher
from harness.record.plan import Plan
from harness.record.store import Store
from harness.run.runner import ProgressListener, Runner


@dataclass
class Place:
    """Results folder, launcher and temporary folder into which faults are injected."""

    store: Store
    launcher: Launcher
    chance: random.Random
    temporary: Path
    """Temporary folder of runs in separate processes."""
    taken_out: set[str] = field(default_factory=set)
    """Names of trial files that were damaged, then quarantined."""

    def trial(self, tried: Cell) -> tuple[str, str]:
        """Runs a cell once, in a new run; returns its status and reason."""
        plan = Plan.new("campaign", [tried], 1, [])
        runner = Runner(self.store, plan, launcher=lambda packages: self.launcher)
        runner.begin()
        assert runner.run(ProgressListener())
        trial = self.store.load([plan.run_id], steps=False).trials.iloc[0]
        return str(trial["status"]), str(trial["reason"])

    def files(self) -> list[Path]:
        """Returns the files of all recorded trials."""
        return sorted((self.store.folder / "trials").glob("*/*.parquet"))


Inject = Callable[[Place], None]
"""Injects a fault; raises AssertionError if the outcome is wrong."""
