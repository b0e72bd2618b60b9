"""Estimates, intervals and verdicts: by hand, by property, and by simulation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from harness.analysis.stats import (
    PAIR_CONFIDENCE,
    SMALLEST_EFFECT,
    Comparison,
    compare_runs,
    estimate,
    median_error,
)
from scripts.slower import paired_ratio


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Comparison | None:
    return paired_ratio(first, second, PAIR_CONFIDENCE)


Draw = Callable[[np.random.Generator, int], "np.ndarray"]


def test_the_interval_of_three_trials_matches_that_worked_out_by_hand() -> None:
    """The median is 2, the standard deviation 1.5275, and t(0.975; 2) 4.3027. A median's standard
    error is 1.1602 times the mean's."""
    found = estimate([1.0, 2.0, 4.0])
    assert found.value == 2.0
    assert found.high is not None
    assert found.high - found.value == pytest.approx(
        4.302653 * median_error(3) * 1.527525 / math.sqrt(3), rel=1e-6
    )
    assert estimate([1.0]).low is None


# Standard error of the median over that of the mean: Hojo 1931, tabulated by Kenney and Keeping
# (1962).
@pytest.mark.parametrize(
    ("trials", "error"),
    [(1, 1.0), (2, 1.0), (3, 1.160), (4, 1.092), (5, 1.197), (7, 1.214), (9, 1.223), (20, 1.214)],
)
def test_a_medians_error_is_the_published_one(trials: int, error: float) -> None:
    assert median_error(trials) == pytest.approx(error, rel=0.01)


def test_a_medians_error_is_that_of_simulated_medians() -> None:
    rng = np.random.default_rng(1)
    for trials in (3, 4, 6, 8, 11, 30, 101):
        medians = np.median(rng.normal(size=(200_000, trials)), axis=1)
        assert median_error(trials) == pytest.approx(medians.std() * math.sqrt(trials), rel=0.015)


SHAPES: dict[str, Draw] = {
    "normal": lambda rng, n: rng.normal(100, 1, n),
    "skewed": lambda rng, n: (
        100 * np.exp(rng.normal(0, 0.02, n) ** 2 * 10 + rng.normal(0, 0.01, n))
    ),
    "now and then slow": lambda rng, n: rng.normal(100, 1, n) - 20 * (rng.random(n) < 0.1),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("trials", [3, 5, 6, 10, 25])
def test_the_interval_covers_the_median_as_often_as_it_says(shape: str, trials: int) -> None:
    rng = np.random.default_rng(2)
    truth = float(np.median(SHAPES[shape](rng, 400_000)))
    found = [estimate([float(x) for x in SHAPES[shape](rng, trials)]) for _ in range(2000)]
    covered = (
        sum(
            one.low <= truth <= one.high
            for one in found
            if one.low is not None and one.high is not None
        )
        / 2000
    )
    assert covered >= 0.93
    if shape == "normal":
        assert covered <= 0.97


def test_a_comparison_matches_that_worked_out_by_hand() -> None:
    """Ratios of 1.01 and 1.03 within rounds have the geometric mean 1.01995, whatever the rounds'
    levels; t(0.9975; 1) is 127.32."""
    found = paired({0: 101.0, 1: 51.5, 5: 9.0}, {0: 100.0, 1: 50.0, 2: 1.0})
    assert found is not None
    assert found.rounds == 2
    assert found.ratio == pytest.approx(math.sqrt(1.01 * 1.03))
    spread = (math.log(1.03) - math.log(1.01)) / math.sqrt(2)
    assert math.log(found.high / found.ratio) == pytest.approx(
        127.3213 * spread / math.sqrt(2), rel=1e-4
    )
    assert found.verdict == "no difference seen"
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_verdicts_have_words() -> None:
    base = dict.fromkeys(range(5), 100.0)
    nearly = {r: 100.0 * (1 + 1e-5 * r) for r in base}
    for factor, said in (
        (1.02, "faster"),
        (0.98, "slower"),
        (1 + SMALLEST_EFFECT / 2, "no difference seen"),
    ):
        found = paired({r: v * factor for r, v in nearly.items()}, base)
        assert found is not None
        assert found.verdict == said
    one = paired({0: 2.0}, {0: 1.0})
    assert one is not None
    assert one.verdict == "no difference seen", "one launch of each proves nothing"
    equal = compare_runs([1.0, 1.0], [1.0, 1.0])
    assert equal is not None
    assert (equal.ratio, equal.verdict) == (1.0, "no difference seen")
    assert compare_runs([], [1.0]) is None
    assert compare_runs([1.0], [2.0, 2.0]) is not None


throughputs = some.lists(some.floats(1.0, 1e6), min_size=2, max_size=8)


@given(first=throughputs, second=throughputs, scale=some.floats(1e-3, 1e3))
def test_swapping_inverts_the_ratio_and_units_do_not_matter(
    first: list[float], second: list[float], scale: float
) -> None:
    for compare in (
        compare_runs,
        lambda a, b: paired(dict(enumerate(a)), dict(enumerate(b))),
    ):
        one, other = compare(first, second), compare(second, first)
        scaled = compare([v * scale for v in first], [v * scale for v in second])
        assert one is not None
        assert other is not None
        assert scaled is not None
        assert one.ratio == pytest.approx(1 / other.ratio)
        assert one.low == pytest.approx(1 / other.high, rel=1e-6, abs=1e-300)
        assert scaled.ratio == pytest.approx(one.ratio)
        opposite = {"faster": "slower", "slower": "faster"}
        if (
            abs(abs(one.ratio - 1) - SMALLEST_EFFECT) > 1e-4
            and abs(one.low - 1) > 1e-9
            and abs(one.high - 1) > 1e-9
        ):
            assert other.verdict == opposite.get(one.verdict, one.verdict)


@given(values=some.lists(some.floats(1.0, 1e6), min_size=2, max_size=12))
def test_the_median_is_inside_its_interval(values: list[float]) -> None:
    found = estimate(values)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.value == statistics.median(values) <= found.high


def busy_for_a_while(rng: np.random.Generator, rounds: int) -> np.ndarray:
    """Returns throughputs of two cells that spread by 1.1%, with a neighbour that slows some
    launches in a row by up to 40%.
    """
    level = rng.normal(1.0, 0.011, 2 * rounds)
    begin, length = rng.integers(0, 2 * rounds), rng.integers(0, rounds)
    level[begin : begin + length] *= rng.uniform(0.6, 1.0, len(level[begin : begin + length]))
    return level.reshape(rounds, 2)


@pytest.mark.parametrize("rounds", [3, 5, 10, 20])
@pytest.mark.parametrize("neighbour", [False, True])
def test_equals_are_called_different_at_most_once_in_two_hundred(
    rounds: int, neighbour: bool
) -> None:
    rng = np.random.default_rng(3)
    alarms = 0
    for _ in range(4000):
        pairs = busy_for_a_while(rng, rounds) if neighbour else rng.normal(1.0, 0.011, (rounds, 2))
        for row in pairs:  # rounds are shuffled
            rng.shuffle(row)
        found = paired(
            dict(enumerate(map(float, pairs[:, 0]))), dict(enumerate(map(float, pairs[:, 1])))
        )
        alarms += found is not None and found.verdict != "no difference seen"
    assert alarms <= 4000 / 200 * 1.5


def test_three_percent_are_seen_in_ten_rounds() -> None:
    rng = np.random.default_rng(4)
    seen = 0
    for _ in range(1000):
        first, second = rng.normal(0.97, 0.011, 10), rng.normal(1.0, 0.011, 10)
        found = paired(dict(enumerate(map(float, first))), dict(enumerate(map(float, second))))
        seen += found is not None and found.verdict == "slower"
    assert seen >= 950
