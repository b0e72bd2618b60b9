"""A run's remaining time in its progress display."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from bench.cli import run_progress as progress
from bench.cli.run_progress import RunProgress
from harness.cell.cell import Cell
from harness.record.plan import Plan
from harness.record.trial import TrialRecord
from tests.unit.stored_trials import trial_row

CELLS = (Cell(strategy="single"), Cell(strategy="ddp", devices=2))


def trial_of(cell: Cell, trial: int = 0, **columns: Any) -> TrialRecord:
    return TrialRecord(**trial_row(cell, trial, **columns))


def test_one_slow_launch_does_not_multiply_the_remaining_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    plan = Plan("run-1", "test", CELLS, 50)
    seconds = {cell.id: 10.0 for cell in CELLS}
    out = Console(file=io.StringIO())
    predicted = []
    with RunProgress(out, plan, seconds, CELLS * 50) as shown:
        now = 300.0  # references are trained first
        for number in range(100):
            cell = CELLS[number % 2]
            shown.trial_started(cell, number // 2, number)
            now += 70.0 if number == 0 else 10.0
            shown.trial_finished(cell, trial_of(cell))
            predicted.append(shown.seconds_left)
    # 100 launches of 10 s are expected; before the first, 100 s count as measured.
    assert predicted[0] == pytest.approx(990 * (100 + 70) / (100 + 10))
    assert predicted[50] == pytest.approx(490 * (100 + 570) / (100 + 510))
    assert predicted[-1] == 0


def test_launches_twice_as_long_double_the_remaining_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    plan = Plan("run-1", "test", CELLS, 500, time_budget_seconds=1e6)
    out = Console(file=io.StringIO())
    with RunProgress(out, plan, {cell.id: 10.0 for cell in CELLS}, CELLS * 500) as shown:
        for number in range(900):
            cell = CELLS[number % 2]
            shown.trial_started(cell, number, number)
            now += 20.0
            shown.trial_finished(cell, trial_of(cell))
        assert shown.seconds_left == pytest.approx(2000, rel=0.06)
        shown.time_is_spent(100)
        assert (shown.done, shown.total, shown.expected_left) == (900, 900, 0)


def test_a_share_takes_as_long_as_its_own_trials() -> None:
    """The whole run races until its budget of 1000 s is spent; a share never races."""
    plan = Plan("run-1", "test", CELLS, 1, until_answered=True, time_budget_seconds=1000.0)
    seconds = {CELLS[0].id: 10.0, CELLS[1].id: 30.0}
    out = Console(file=io.StringIO())
    assert RunProgress(out, plan, seconds, CELLS).seconds_left == 1000
    assert RunProgress(out, plan, seconds, CELLS[1:], is_share=True).seconds_left == 30


def test_further_trials_count_apart_from_the_planned_ones() -> None:
    """The first cell runs out of memory, so two of its three trials are never launched. The round
    comes before the second cell's planned trials."""
    first, second = CELLS
    plan = Plan("run-1", "test", CELLS, 3)
    text = io.StringIO()
    out = Console(file=text, width=200)
    shown = RunProgress(out, plan, {cell.id: 10.0 for cell in CELLS}, [first] * 3 + [second] * 3)
    shown.trial_finished(first, trial_of(first, status="out_of_memory"))
    assert shown.expected_left == 30
    shown.round_added([second], "one cell")
    assert (shown.total, shown.expected_left) == (6, 40)
    shown.trial_finished(second, trial_of(second, 7, position=6))
    for trial in range(3):
        shown.trial_finished(second, trial_of(second, trial, position=trial + 3))
    assert (shown.done, shown.seconds_left) == (4, 0)
    counts = [line.partition("]")[0] for line in text.getvalue().splitlines() if line[0] == "["]
    assert counts == ["[further 1/1", "[2/6", "[3/6", "[4/6"]
