"""What each layer of the tests may cost, and what a session cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

BUDGETS = {
    "unit": 540,
    "gpu": 300,
    "ranks": 720,
    "browser": 100,
    "faults": 70,
    "cluster": 250,
}
"""Seconds of all workers together that `make test` may spend on a layer. Tests time nothing, so a
layer above its budget is reported, and fails nothing."""
LIMIT_SECONDS = 5
"""A test that takes longer belongs to the thorough ones."""
SLOWEST = 5


def layer(test: str) -> str:
    """Returns the folder of a test's id below tests/."""
    return test.split("/")[1] if test.count("/") > 1 else ""


def summary(seconds: Mapping[str, float], limited: Mapping[str, float]) -> Iterator[str]:
    """Yields lines with each layer's number of tests, seconds and budget, and the slowest tests
    above the limit. `limited`: seconds of those that are not thorough, without their fixtures."""
    for name, budget in BUDGETS.items():
        if found := [duration for test, duration in seconds.items() if layer(test) == name]:
            over = ", above its budget" if sum(found) > budget else ""
            yield f"{name}: {len(found)} tests, {sum(found):.0f} s of {budget} s{over}"
    slow = {test: duration for test, duration in limited.items() if duration > LIMIT_SECONDS}
    if slow:
        yield f"{len(slow)} tests took more than {LIMIT_SECONDS} s, of which the slowest:"
    for test in sorted(slow, key=lambda test: -slow[test])[:SLOWEST]:
        yield f"{slow[test]:.1f} s {test}"
