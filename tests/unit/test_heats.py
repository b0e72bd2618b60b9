"""Estimates from heats, whose trials are interleaved, and from separate trials."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import numpy as np
import pytest

from harness.analysis.race import (
    APART_ALLOWANCE,
    HEAT_ALLOWANCE,
    contenders,
    heat_of,
    joined,
    quasi_variances,
)
from harness.analysis.ranking import against_best, gains
from harness.analysis.stats import LogEstimate, added_level_error, ratio

LEVELS = {"a": 0.0, "b": -0.03, "c": -0.05, "d": -0.08, "e": -0.10}
HEATS = (("a", "b", "c", "d"), ("a", "e"), ("a", "b", "c"), ("a", "b", "e"), ("a", "b"))
NOISE, SEPARATE = 0.01, 0.04


def measured(chance: random.Random) -> tuple[dict[str, LogEstimate], list[dict[str, float]]]:
    separate = {
        name: LogEstimate(level + chance.gauss(0, SEPARATE), SEPARATE, 20, 1)
        for name, level in LEVELS.items()
    }
    heats = []
    for names in HEATS:
        machine = chance.gauss(0, 0.2)
        heats.append({name: LEVELS[name] + machine + chance.gauss(0, NOISE) for name in names})
    return separate, heats


def test_slow_spells_and_single_turns_cancel() -> None:
    speed = [100, 60, 100, 80, 100, 100]
    turns = {
        "a": [1.0 * x for x in speed],
        "b": [0.9 * x for x in speed],
        "c": [0.8 * x for x in speed],
    }
    turns["b"][2] /= 3
    found = heat_of(turns)
    assert found["b"] - found["a"] == pytest.approx(math.log(0.9), abs=1e-6)
    assert found["c"] - found["a"] == pytest.approx(math.log(0.8), abs=1e-6)
    shorter = heat_of({"a": turns["a"], "b": turns["b"][:5]})
    assert shorter["b"] - shorter["a"] == pytest.approx(math.log(0.9), abs=1e-6)


def test_intervals_of_differences_and_levels_hold() -> None:
    chance = random.Random(1)
    held: dict[str, list[bool]] = {name: [] for name in LEVELS}
    for _ in range(600):
        cells = joined(*measured(chance))[0]
        for name, level in LEVELS.items():
            gap = LogEstimate(
                cells[name].mean - cells["a"].mean - (level - LEVELS["a"]),
                math.hypot(cells["a"].error, cells[name].error),
                cells[name].degrees,
                1,
            )
            whole = cells["a"] if name == "a" else gap
            interval = whole.estimate()
            assert interval.low is not None
            assert interval.high is not None
            held[name].append(interval.low <= 1 <= interval.high)
    shares = {name: statistics.fmean(own) for name, own in held.items()}
    assert all(0.935 <= share <= 0.99 for share in shares.values()), shares
    typical = joined(*measured(chance))[0]
    assert typical["a"].error < typical["e"].error < 0.015
    assert [typical[name].trials for name in LEVELS] == [6, 5, 3, 2, 3]


@pytest.mark.parametrize(
    ("slower", "least", "most"), [(0.0, 0.0, 1 / 200 * 1.5), (0.03, 0.95, 1.0)]
)
def test_three_percent_are_seen_in_ten_heats(slower: float, least: float, most: float) -> None:
    """The machine's speed varies by a tenth between heats; launches of a cell spread by 1.1%."""
    chance = random.Random(4)
    separate = {name: LogEstimate(0.0, SEPARATE, 20, 1) for name in "ab"}
    different = 0
    for _ in range(1000):
        heats = [
            {"a": machine + chance.gauss(0, 0.011), "b": machine + chance.gauss(-slower, 0.011)}
            for machine in [chance.gauss(0, 0.1) for _ in range(10)]
        ]
        cells = joined(separate, heats)[0]
        different += ratio(cells["b"], cells["a"]).verdict != "no difference seen"
    assert least <= different / 1000 <= most


def test_heats_of_different_settings_do_not_tie_their_cells() -> None:
    separate = {
        name: LogEstimate(mean, SEPARATE, 20, 1)
        for name, mean in {"a": 0.0, "b": 0.0, "c": 2.0, "d": 2.0}.items()
    }
    heats = [{"a": 1.0, "b": 0.9}, {"c": 5.0, "d": 4.9}] * 5
    cells, levels = joined(separate, heats)
    assert cells["a"].mean - cells["b"].mean == pytest.approx(0.1, abs=0.001)
    assert cells["c"].mean == pytest.approx(2.05, abs=0.001)
    assert levels[0] == pytest.approx(0.95, abs=0.01)
    assert levels[1] == pytest.approx(2.95, abs=0.01)
    assert cells["a"].level_error == pytest.approx(SEPARATE / math.sqrt(2), rel=0.01)
    within, across = (ratio(cells["a"], cells[name], 0.95) for name in "bc")
    assert within.precision is not None
    assert across.precision is not None
    assert within.precision < 3 * HEAT_ALLOWANCE
    assert across.precision > 1.95 * SEPARATE, "each level is known by two separate trials"


def test_a_cell_of_another_launcher_has_a_larger_allowance() -> None:
    separate = {name: LogEstimate(0.0, SEPARATE, 20, 1, allowance=0.006) for name in "abc"}
    cells, _ = joined(separate, [{"a": 1.0, "b": 0.9}] * 5, apart={"b"})
    assert cells["a"].allowance == HEAT_ALLOWANCE
    assert cells["b"].allowance == pytest.approx(math.hypot(HEAT_ALLOWANCE, APART_ALLOWANCE))


def in_two_parts(chance: random.Random) -> dict[str, LogEstimate]:
    """Returns estimates of equally fast cells a to d, of which only ab and cd share heats."""
    separate = {name: LogEstimate(chance.gauss(0, SEPARATE), SEPARATE, 1000, 1) for name in "abcd"}
    heats = [
        {name: machine + chance.gauss(0, NOISE) for name in names}
        for names in ("ab", "cd") * 5
        for machine in [chance.gauss(0, 0.2)]
    ]
    return joined(separate, heats)[0]


def test_statements_hold_across_different_heats() -> None:
    chance, runs = random.Random(3), 500
    held = {"pair": 0, "best": 0, "baseline": 0, "race": 0}
    for _ in range(runs):
        cells = in_two_parts(chance)
        found = [ratio(cells["a"], cells["c"], 0.95)]
        against = gains(cells["a"], [cells[name] for name in "bcd"])
        held["pair"] += all((one.low or 2) <= 1 <= (one.high or 0) for one in found)
        held["best"] += against_best([*cells.values()])[0].may_be_best
        held["baseline"] += all((one.low or 2) <= 1 <= (one.high or 0) for one in against)
        held["race"] += contenders(cells) == cells.keys()
    assert held["race"] >= 0.99 * runs
    assert 0.935 <= held["pair"] / runs <= 0.975
    assert 0.935 <= held["best"] / runs <= 0.99
    assert 0.935 <= held["baseline"] / runs <= 0.99


def test_a_level_is_common_to_all_pairs_of_two_parts() -> None:
    first = LogEstimate(0.0, 0.01, 20, 3, level_error=0.03, part=0)
    second = replace(first, level_error=0.04, part=1)
    assert added_level_error([(first, second)] * 9) == pytest.approx(0.05)
    assert added_level_error([(first, first), (second, second)]) == 0
    assert added_level_error([(first, second), (second, first)]) == 0
    alone = LogEstimate(0.0, 0.05, 20, 3)
    assert added_level_error([(first, alone)]) == pytest.approx(0.03)
    assert added_level_error([(first, replace(alone, included_level_error=0.03))]) == 0


def test_until_their_spread_is_known_heats_are_as_noisy_as_separate_trials() -> None:
    separate = {name: LogEstimate(0.0, SEPARATE, 20, 1) for name in "abc"}
    few = joined(separate, [{"a": 0.0, "b": -0.1, "c": -0.2}])[0]
    assert few["a"].degrees == 20
    assert few["a"].error == pytest.approx(SEPARATE / math.sqrt(2), rel=0.2)
    unknown = {name: LogEstimate(0.0, 0.0, 0, 1) for name in "ab"}
    assert joined(unknown, [{"a": 0.0, "b": -0.1}])[0]["a"].degrees == 0
    known = joined(unknown, [{"a": 0.0, "b": -0.1}, {"a": 1.0, "b": 0.91}])[0]
    assert known["a"].degrees == 1


def test_quasi_variances_of_independent_cells_are_their_variances() -> None:
    own = np.diag([1.0, 2.0, 4.0])
    assert quasi_variances(own) == pytest.approx([1.0, 2.0, 4.0])
    assert quasi_variances(own + 10) == pytest.approx([1.0, 2.0, 4.0]), "a common error cancels"
    assert quasi_variances(np.diag([1.0, 3.0])) == pytest.approx([2.0, 2.0])
    assert quasi_variances(np.array([[5.0]])) == pytest.approx([5.0])
