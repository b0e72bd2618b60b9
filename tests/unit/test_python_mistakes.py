"""Mistakes in calls of bench.run are one sentence."""

from __future__ import annotations

import pytest

import bench
from harness.spec.errors import UsageError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either cells or a matrix"),
        ({"matrix": "smoke", "trials": 0}, "trials 0"),
        ({"matrix": "smoke", "timed_seconds": -1.0}, "timed_seconds -1.0"),
        ({"matrix": "smoke", "time_budget_seconds": float("nan")}, "time_budget_seconds nan"),
    ],
)
def test_mistakes(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bench.run(**options)  # type: ignore[arg-type]
