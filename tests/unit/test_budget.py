"""The summary of what the layers cost."""

from __future__ import annotations

from tests.budget import BUDGETS, summary


def test_layers_above_their_budget_and_slow_tests_are_named() -> None:
    ranks = {f"tests/ranks/test_broken.py::test_{n}": n + 0.5 for n in range(8)}
    unit = {"tests/unit/test_docs.py::test_c": BUDGETS["unit"] + 1.0}
    assert list(summary(ranks | unit, ranks)) == [
        "unit: 1 tests, 541 s of 540 s, above its budget",
        "ranks: 8 tests, 32 s of 1080 s",
        "3 tests took more than 5 s, of which the slowest:",
        *(f"{n}.5 s tests/ranks/test_broken.py::test_{n}" for n in (7, 6, 5)),
    ]
    assert list(summary({"tests/unit/test_docs.py::test_c": 1.0}, {})) == [
        "unit: 1 tests, 1 s of 540 s"
    ]
