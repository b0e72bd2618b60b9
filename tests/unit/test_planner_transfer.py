"""Interval widths from made-up errors on left-out rows."""

from __future__ import annotations

import numpy as np
import pytest

from docs.studies.planner_calibration import ONE_MODEL, ONE_NODE_COUNT, transfer_widths
from harness.planner.cluster.calibration import Bools, Floats

NODES = np.repeat([1, 2, 4, 8], 50)
SIZES = np.tile([4e9, 8e9], 100)
SHARES = np.tile(np.repeat(np.linspace(0.02, 1.0, 25), 2), 4)
"""Quantiles of the errors, uniform for each number of nodes and model."""


def made(seen: Bools, left: Bools) -> tuple[Floats, Floats]:
    """Returns errors of at most 0.1, plus 0.2 per doubling of nodes and 0.3 of parameters."""
    more = np.maximum(0.0, np.log2(NODES[left] / NODES[seen].max()))
    larger = np.abs(np.log2(SIZES[left] / SIZES[seen].max()))
    larger = larger if len(set(SIZES[seen])) == 1 else 0.0
    errors = SHARES[left] * (0.1 + 0.2 * more + 0.3 * larger)
    return errors, errors / 10


def test_widths_follow_from_rows_left_out() -> None:
    found = transfer_widths(SIZES, NODES, made)
    assert found.nodes.time == pytest.approx(0.16, rel=0.1)
    assert found.shape.time == pytest.approx(0.24, rel=0.1)
    assert found.nodes.memory == pytest.approx(0.016, rel=0.1)
    # The width without distance also covers the errors on 8 nodes, which were left out.
    assert 0.08 <= found.time + found.time_per_doubling * 1.5 <= 0.16
    assert found.memory == pytest.approx(0.0094, rel=0.2)


def test_what_cannot_be_left_out_widens_as_in_the_built_in_calibration() -> None:
    one = np.full(200, 8)
    found = transfer_widths(np.full(200, 4e9), one, lambda seen, left: made(seen | True, left))
    assert (found.nodes, found.shape) == (ONE_NODE_COUNT, ONE_MODEL)
    assert found.memory == pytest.approx(0.008, rel=0.05)


def test_parts_too_few_to_fit_are_passed_over() -> None:
    found = transfer_widths(SIZES, NODES, lambda s, rows: made(s, rows) if s.all() else None)
    assert (found.nodes, found.shape) == (ONE_NODE_COUNT, ONE_MODEL)
