"""Fixtures that run trials with real gloo ranks from one warm fork server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from _pytest.mark import ParameterSet

from harness.cell.cell import Cell
from harness.launch.launcher import Launcher
from harness.record.plan import Plan
from harness.record.store import Results, Store
from harness.run.runner import ProgressListener, Runner
from harness.seam.registry import make_strategy, strategies
from tests.waiting import LONG

RunCells = Callable[..., Results]


@pytest.fixture(scope="session")
def launcher() -> Launcher:
    packages = [
        package
        for package in ("accelerate", "deepspeed", "peft", "bitsandbytes", "fairscale")
        if find_spec(package)
    ]
    preloaded = (name for cls in strategies().values() for name in cls.capabilities.preload)
    parts = ("torch.distributed.optim", "torch.distributed.pipelining")
    return Launcher([*packages, *preloaded, *parts])


@pytest.fixture
def run_cells(launcher: Launcher, tmp_path: Path) -> RunCells:
    """Runs cells through the runner and the store; returns the recorded results."""

    def run(
        *cells: Cell, trials: int = 1, timed_seconds: float = 0.0, long_training: bool = False
    ) -> Results:
        store = Store(tmp_path / "results")
        plan = Plan.new("test", cells, trials, [])
        plan = dataclasses.replace(plan, timed_seconds=timed_seconds, long_training=long_training)
        runner = Runner(store, plan, launcher=lambda packages: launcher)
        runner.begin()
        assert runner.run(ProgressListener())
        return store.load([plan.run_id])

    return run


def cell(strategy: str, devices: int = 2, workload: str = "llama-nano", **axes: Any) -> Cell:
    """Returns a small cell: 3 warm-up and 5 timed steps of a nano model."""
    return Cell(
        **{
            "strategy": strategy,
            "devices": devices,
            "workload": workload,
            "sequence_length": 32,
            "warmup_steps": 3,
            "timed_steps": 5,
            "parity_steps": 8,
            "time_limit_seconds": LONG,
            **axes,
        }
    )


def representative(rows: Iterable[Any]) -> list[ParameterSet]:
    """Returns parameters of which the first is tested by default, and the others are thorough."""
    found = []
    for number, row in enumerate(rows):
        if not isinstance(row, ParameterSet):
            row = pytest.param(*row) if isinstance(row, tuple) else pytest.param(row)
        marks = [*row.marks, *[pytest.mark.thorough] * (number > 0)]
        found.append(pytest.param(*row.values, marks=marks, id=row.id))
    return found


def ended(trial: Any, status: str, reason: str) -> None:
    """Checks how a trial ended; shows its log if the status differs."""
    assert trial["status"] == status, trial["log_tail"]
    assert reason in trial["reason"]


class Row(NamedTuple):
    """A cell and how it must end."""

    outcome: str
    """Parity verdict of a trial that ends well, otherwise its status."""
    cell: Cell
    reason: str
    """Part of the trial's reason."""


def row(
    outcome: str,
    strategy: str,
    options: dict[str, Any] | None = None,
    reason: str = "",
    **axes: Any,
) -> Row:
    return Row(outcome, cell(strategy, options=options or {}, **axes), reason)


def check_rows(
    run_cells: RunCells, rows: Iterable[Row], timed_seconds: float = 0.0
) -> list[dict[str, Any]]:
    """Runs the rows' cells in one run; returns their trials in this order.

    Fails with all rows that ended differently. Skips if a library of a row is not installed.
    """
    rows = list(rows)
    needed = {package for one in rows for package in make_strategy(one.cell).requires}
    if missing := [package for package in sorted(needed) if not find_spec(package.split(".")[0])]:
        pytest.skip(f"{', '.join(missing)} is not installed: make setup")
    found = run_cells(*(one.cell for one in rows), timed_seconds=timed_seconds).trials
    trials = {trial["cell_id"]: trial for trial in found.to_dict("records")}
    wrong = {}
    for outcome, one, reason in rows:
        trial = trials[one.id]
        ended = trial["parity_verdict"] if trial["status"] == "ok" else trial["status"]
        if ended != outcome or reason not in trial["reason"]:
            wrong[one.name] = (outcome, reason), (ended, trial["reason"], trial["log_tail"][-800:])
    assert wrong == {}
    return [trials[one.cell.id] for one in rows]
