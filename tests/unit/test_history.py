"""A cell's history over runs: change points by hand and by simulation, without processes."""

from __future__ import annotations

import itertools
import json
import math
import random
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from bench.cli.compare import compare
from harness.analysis.history import FALSE_ALARM_RATE, MIN_RUNS, change_points, histories
from harness.analysis.selection import measured
from harness.cell.cell import Cell
from harness.record.run_record import RunRecord
from harness.record.store import Store
from harness.record.trial import TrialRecord
from tests import commands
from tests.unit.made_results import left_out, run_row, trial_rows

CELL = Cell(strategy="ddp", devices=2)
OTHER = Cell(strategy="fsdp2", devices=2)
ALTERNATING = [100.0, 101.0] * 6


def noisy(rng: random.Random, runs: int, noise: float, outlying: float = 0.0) -> list[float]:
    """Simulates throughputs around 100; a share `outlying` of the runs is 40% slower."""
    return [
        100 * math.exp(rng.gauss(0, noise)) * (0.6 if rng.random() < outlying else 1)
        for _ in range(runs)
    ]


def test_a_step_worked_out_by_hand_is_found() -> None:
    assert change_points([*ALTERNATING, *(0.9 * v for v in ALTERNATING)], 0.01) == [12]
    assert change_points(
        [*ALTERNATING, *(1.2 * v for v in ALTERNATING), *(0.9 * v for v in ALTERNATING)], 0.01
    ) == [12, 24]


def test_a_passing_change_has_a_beginning_and_an_end() -> None:
    values = [*ALTERNATING, *(0.9 * v for v in ALTERNATING[:6]), *ALTERNATING]
    assert change_points(values, 0.01) == [12, 18]


def test_a_step_below_the_smallest_effect_does_not_count() -> None:
    small = [*(100 + i / 1000 for i in range(12)), *(100.5 + i / 1000 for i in range(12))]
    assert change_points(small, 0.01) == []
    assert change_points(small, 0.001) == [12]


@given(place=some.integers(0, 23), size=some.floats(0.1, 10.0))
def test_an_outlying_run_is_no_change(place: int, size: float) -> None:
    values = [*ALTERNATING, *ALTERNATING]
    values[place] *= size
    assert change_points(values, 0.01) == []


@given(some.lists(some.floats(1e-3, 1e9), max_size=14))
def test_change_points_are_ordered_and_apart(values: list[float]) -> None:
    found = change_points(values, 0.01)
    cuts = [0, *found, len(values)]
    assert not found or all(b - a >= MIN_RUNS for a, b in itertools.pairwise(cuts))
    assert change_points([1000 * value for value in values], 0.01) == found


@pytest.mark.parametrize("value", [1.0, 100.0])
def test_equal_runs_have_no_change(value: float) -> None:
    for runs in (0, 1, 5, 6, 30):
        assert change_points([value] * runs, 0.01) == []


@pytest.mark.slow
def test_series_without_a_change_are_marked_at_most_at_the_stated_rate() -> None:
    """Simulates 2000 series of several lengths, with 1 and 5% noise, with and without outliers."""
    rng = random.Random(7)
    settings = [
        (runs, noise, outlying)
        for runs in (6, 9, 15, 30, 60)
        for noise in (0.01, 0.05)
        for outlying in (0.0, 0.1)
    ]
    alarms = {
        setting: sum(bool(change_points(noisy(rng, *setting), 0.01)) for _ in range(100))
        for setting in settings
    }
    assert sum(alarms.values()) <= FALSE_ALARM_RATE * 100 * len(settings), alarms
    assert max(alarms.values()) <= 5, alarms


@pytest.mark.parametrize(("outlying", "after", "least"), [(0.0, 8, 90), (0.05, 12, 80)])
def test_a_step_of_3_percent_in_noise_of_1_percent_is_found(
    outlying: float, after: int, least: int
) -> None:
    """A step after 20 runs is found 8 runs later (12 if one in twenty is an outlier), to within a
    run."""
    rng = random.Random(11)
    found = 0
    for _ in range(100):
        values = noisy(rng, 20 + after, 0.01, outlying)
        values[20:] = [0.97 * value for value in values[20:]]
        found += any(abs(place - 20) <= 1 for place in change_points(values, 0.01))
    assert found >= least


def stored(folder: Path, speeds: list[float], cell: Cell = CELL, **changes: Any) -> Store:
    """Writes one run per day, with three trials each."""
    store = Store(folder)
    for day, speed in enumerate(speeds):
        began = datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(days=day)
        run_id = f"{began:%Y%m%dT%H%M%S}-{cell.strategy[:1]}00{changes.get('cpu_cores', 2)}"
        store.write_run(RunRecord(**run_row(run_id=run_id, started_at=began, **changes)))
        for row in trial_rows(cell, [0.999 * speed, speed, 1.001 * speed]):
            store.write_trial(TrialRecord(**(row | {"run_id": run_id})))
    return store


def test_a_series_is_of_equal_hardware_and_verified_runs(tmp_path: Path) -> None:
    store = stored(tmp_path, [100.0] * 7 + [90.0] * 7)
    stored(tmp_path, [500.0] * 2, cpu_cores=64)
    store.write_run(RunRecord(**run_row(run_id="20260201T000000-bad0")))
    store.write_trial(
        TrialRecord(
            **(left_out(CELL, "failed", "the reason")[0] | {"run_id": "20260201T000000-bad0"})
        )
    )
    (series,) = histories(measured(store.load(steps=False)), "throughput")
    values = [point.value.value for point in series.points]
    assert values == pytest.approx([100.0] * 7 + [90.0] * 7, rel=1e-5)
    assert (series.elsewhere, series.failed) == (2, 1)
    assert [point.change is None for point in series.points] == [True] * 7 + [False] + [True] * 6
    assert series.last_change is not None
    assert series.last_change.change == pytest.approx(-0.1)
    assert series.last_change.run_id.startswith("20260108")
    assert series.newest.value.low is not None


def ask(folder: Path, *words: str) -> str:
    return commands.told(compare, "--history", *words, "--results", str(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    stored(tmp_path, [100.0] * 7 + [90.0] * 7)
    stored(tmp_path, [50.0] * 2, OTHER)
    return tmp_path


def test_each_cell_has_a_line_and_a_chosen_one_has_a_line_for_each_run(folder: Path) -> None:
    told = ask(folder).splitlines()
    (ddp,), (fsdp2,) = ([line for line in told if cell.name in line] for cell in (CELL, OTHER))
    assert "▼ 10.0% slower since 2026-01-08" in ddp
    assert "slower" not in fsdp2
    lines = [line for line in ask(folder, "ddp").splitlines() if "T000000-" in line]
    changed = [False] * 7 + [True] + [False] * 6
    assert ["▼ 10.0% slower" in line for line in lines] == changed
    points = json.loads(ask(folder, "ddp", "--json"))["cells"][0]["points"]
    assert [point["change"] is not None for point in points] == changed
