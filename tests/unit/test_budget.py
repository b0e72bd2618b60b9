"""The summary of what the layers cost."""

from __future__ import annotations

from tests.budget import BUDGETS, summary


def test_layers_above_their_budget_and_slow_tests_are_named() -> None:
    ranks = {f"tests/ranks/test_traps.py::test_{n}": n + 0.5 for n in range(8)}
    unit = {"tests/unit/test_docs.py::test_c": BUDGETS["unit"] + 1.0}
    assert list(summary(ranks | unit, ranks)) == [
        f"unit: 1 tests, {BUDGETS['unit'] + 1} s of {BUDGETS['unit']} s, above its budget",
        f"ranks: 8 tests, 32 s of {BUDGETS['ranks']} s",
        "3 tests took more than 5 s, of which the slowest:",
        *(f"{n}.5 s tests/ranks/test_traps.py::test_{n}" for n in (7, 6, 5)),
    ]
    assert list(summary({"tests/unit/test_docs.py::test_c": 1.0}, {})) == [
        f"unit: 1 tests, 1 s of {BUDGETS['unit']} s"
    ]
