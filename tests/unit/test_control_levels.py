"""Whether the control's time depends on its neighbour: levels by launcher, randomisation test."""

from __future__ import annotations

import math
import random
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from harness.analysis.control_levels import ControlLevels, control_levels
from harness.record.trial import TrialRecord
from harness.spec.cell import Cell
from tests.unit.made_results import stored, trial_rows

STRATEGIES = [f"strategy{number}" for number in range(12)]
LAUNCHERS = {"elastic": 0.0, "mpirun": math.log(0.96)}


def levels(tmp_path: Path, biased: bool, seed: int) -> ControlLevels:
    """Six rounds on a machine whose speed drifts by half; the last four strategies are started by
    mpirun, next to which a biased control takes 0.96 times as long."""
    chance = random.Random(seed)
    began, rows = datetime(2026, 1, 1, tzinfo=timezone.utc), []
    for trial in range(6):
        for name in chance.sample(STRATEGIES, len(STRATEGIES)):
            launcher = "mpirun" if name in STRATEGIES[-4:] else "elastic"
            (row,) = trial_rows(Cell(strategy=name, devices=2), [8.0])
            bias = LAUNCHERS[launcher] if biased else 0.0
            drift = 0.25 * math.sin(len(rows) / 40)
            seconds = 0.1 * math.exp(drift + bias + chance.gauss(0, 0.015))
            windows = {
                "window_step_seconds": [1.0],
                "window_control_seconds": [seconds],
                "window_slowest_control_seconds": [seconds],
            }
            at = began + timedelta(seconds=5 * len(rows))
            rows.append(row | {"trial": trial, "launcher": launcher, "started_at": at} | windows)
    found = control_levels(TrialRecord.from_frame(stored(tmp_path / str(seed), rows).trials))
    assert found
    return found


def test_control_that_depends_on_the_launcher_is_seen(tmp_path: Path) -> None:
    found = levels(tmp_path, biased=True, seed=1)
    assert not found.by_chance
    assert found.labels == len(STRATEGIES)
    elastic, mpirun = found.launchers
    assert (elastic.launcher, mpirun.launcher) == tuple(LAUNCHERS)
    assert (elastic.trials, mpirun.trials) == (48, 24)
    assert mpirun.ratio / elastic.ratio == pytest.approx(0.96, abs=0.012)


def test_control_that_does_not_is_left_in_peace(tmp_path: Path) -> None:
    assert sum(levels(tmp_path, biased=False, seed=seed).by_chance for seed in range(20)) >= 18


def test_one_strategy_has_nothing_to_compare(tmp_path: Path) -> None:
    rows = trial_rows(Cell(strategy="ddp"), [8.0, 8.1, 7.9])
    assert control_levels(TrialRecord.from_frame(stored(tmp_path, rows).trials)) is None
