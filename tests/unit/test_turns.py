"""Arithmetic of the overhead benchmark: from steps to turns to the ratio of suite and script."""

from __future__ import annotations

import math

import pytest

from tests.benchmarks.test_overhead import by_turn, compared


def test_a_step_as_long_as_a_turn_separates_turns() -> None:
    steps = [9.0, 0.1, 0.3, 0.2, 1.2, 0.4, 0.6, 1.5, 1.0, 0.7]
    assert by_turn(steps, 0, 1.0) == {1: 0.2, 2: 0.5, 4: 0.7}
    assert by_turn(steps, 3, 1.0) == {1: 0.2, 2: 0.5, 4: 0.7}
    assert by_turn(steps, 4, 1.0) == {2: 0.5, 4: 0.7}


def test_a_turn_is_compared_with_those_before_and_after_it() -> None:
    script = {0: 1.0, 1: 1.21, 2: 1.44}
    assert compared({0: 1.1, 1: 1.32, 2: 5.0}, script) == pytest.approx(1.0)
    assert compared({0: 1.1 * 1.02, 1: 1.32 * 1.02}, script) == pytest.approx(1.02)


def test_a_proportional_drift_cancels() -> None:
    # Script and suite are interleaved; the script comes first.
    speeds = [math.exp(0.05 * turn) for turn in range(20)]
    script, suite = (
        dict(enumerate(speeds[::2])),
        {turn: 1.01 * time for turn, time in enumerate(speeds[1::2])},
    )
    assert compared(suite, script) == pytest.approx(1.01)
