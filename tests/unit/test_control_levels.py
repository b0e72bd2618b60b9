"""The control's times by launcher, and the randomisation test for effects of a neighbour."""

from __future__ import annotations

import dataclasses
import math
import random
from datetime import datetime, timedelta, timezone

import pytest

from harness.analysis.consistency import ControlLevels, control_levels
from harness.cell.cell import Cell
from harness.record.trial import TrialRecord
from tests.unit.made_results import trial_rows

STRATEGIES = [f"strategy{number}" for number in range(12)]
LAUNCHERS = {"elastic": 0.0, "mpirun": math.log(0.96)}


def trials() -> dict[str, TrialRecord]:
    """Returns one trial per strategy; mpirun starts the last four."""
    found = {}
    for name in STRATEGIES:
        launcher = "mpirun" if name in STRATEGIES[-4:] else "elastic"
        (row,) = trial_rows(Cell(strategy=name), [8.0], launcher=launcher)
        found[name] = TrialRecord(**row)
    return found


def levels(biased: bool, seed: int) -> ControlLevels:
    """Simulates six rounds on a machine whose speed drifts by half. Next to mpirun, a biased
    control takes 0.96 times as long."""
    chance, by_name = random.Random(seed), trials()
    began, run = datetime(2026, 1, 1, tzinfo=timezone.utc), []
    for _ in range(6):
        for name in chance.sample(STRATEGIES, len(STRATEGIES)):
            bias = LAUNCHERS[str(by_name[name].launcher)] if biased else 0.0
            drift = 0.25 * math.sin(len(run) / 40)
            seconds = 0.1 * math.exp(drift + bias + chance.gauss(0, 0.015))
            run.append(
                dataclasses.replace(
                    by_name[name],
                    started_at=began + timedelta(seconds=5 * len(run)),
                    window_step_seconds=[1.0],
                    window_control_seconds=[seconds],
                )
            )
    found = control_levels(run)
    assert found
    return found


def test_control_that_depends_on_the_launcher_is_seen() -> None:
    found = levels(biased=True, seed=1)
    assert not found.by_chance
    assert found.labels == len(STRATEGIES)
    elastic, mpirun = found.launchers
    assert (elastic.launcher, mpirun.launcher) == tuple(LAUNCHERS)
    assert (elastic.trials, mpirun.trials) == (48, 24)
    assert mpirun.ratio / elastic.ratio == pytest.approx(0.96, abs=0.012)


def test_an_unbiased_control_raises_no_alarm() -> None:
    assert sum(levels(biased=False, seed=seed).by_chance for seed in range(20)) >= 18


def test_one_strategy_has_nothing_to_compare() -> None:
    rows = trial_rows(Cell(strategy="ddp"), [8.0, 8.1, 7.9])
    assert control_levels([TrialRecord(**row) for row in rows]) is None
