"""The envelope of the losses after the parity segment."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from harness.parity.later import MOST, NARROWEST, envelope, with_jumps, with_later
from harness.parity.verdict import ParityVerdict

EXACT = ParityVerdict("exact", "", 1e-7, 1e-5, "weight", 1e-6, 1e-4)


def test_envelope_follows_the_drift_of_the_references() -> None:
    drift = [1e-7] * 20 + [1e-5] * 20
    assert envelope(5, 3, 1e-6, 0.0, drift) == pytest.approx(3e-6)
    assert envelope(30, 3, 1e-6, 0.0, drift) == pytest.approx(3e-4)
    assert envelope(5, 3, 1e-6, 0.0, [0.0] * 40) == NARROWEST
    assert envelope(5, 3, 1e-6, 1e-5, [0.0] * 40) == pytest.approx(3e-5), "three times its own"
    assert envelope(2, 3, 2e-3, 0.0, [0.0] * 40) == 2e-3, "as declared"
    assert envelope(11, 3, 2e-3, 0.0, [0.0] * 40) == 4e-3, (
        "twice as much after four times the steps"
    )
    assert envelope(30, 3, 2e-3, 0.0, drift) == pytest.approx(0.2), (
        "the declared tolerance grows as the drift did since the segment, here a hundredfold"
    )
    assert envelope(39, 3, 1e-6, 0.0, [1.0] * 40) == MOST
    assert envelope(39, 3, 0.3, 0.0, drift) == math.inf


@given(
    some.lists(some.floats(0.0, 1.0), max_size=40),
    some.integers(3, 39),
    some.floats(1e-6, 0.04),
    some.floats(0.0, 0.1),
)
def test_the_envelope_is_narrowest_without_drift(
    drift: list[float], step: int, tolerance: float, own: float
) -> None:
    """A trial that stays in the narrowest envelope needs no second reference run."""
    narrowest = envelope(step, 3, tolerance, own, [0.0] * 40)
    assert narrowest <= envelope(step, 3, tolerance, own, drift)


def test_the_envelope_without_a_second_reference_grows_by_step() -> None:
    first, second = (envelope(step, 3, 1e-6, 0.0, []) for step in (3, 4))
    assert first == pytest.approx(1e-5 * math.exp(0.08))
    assert second / first == pytest.approx(math.exp(0.08))


def test_a_convolutional_net_may_jump_where_its_references_did_not() -> None:
    """ResNet-micro in one process deviated this much on one core against two (steps 19, 23, 36)."""
    drift = [1.3e-7] * 60
    jumping = with_jumps(drift, 11)
    assert jumping[:11] == drift[:11]
    assert with_jumps([], 11) == []
    for step, deviation in ((19, 8e-6), (23, 5.2e-5), (36, 4e-4)):
        assert envelope(step, 11, 1e-6, 0.0, drift) < deviation
        assert envelope(step, 11, 1e-6, 0.0, jumping) > deviation
    assert envelope(12, 11, 1e-6, 0.0, jumping) < 1e-3


def test_a_loss_outside_is_diverged_and_its_step_named() -> None:
    drift = [1e-7] * 40
    assert with_later(EXACT, [1e-7, 2e-6], 8, drift) is EXACT
    judged = with_later(EXACT, [1e-7, 1e-4], 8, drift)
    assert judged.verdict == "diverged"
    assert "off by 1.0e-04 at step 9, after the parity segment" in judged.reason
    lost = with_later(replace(EXACT, loss_tolerance=0.3), [math.inf], 8, drift)
    assert lost.verdict == "diverged", "a loss that is not finite never agrees"
    assert "not finite" in lost.reason
