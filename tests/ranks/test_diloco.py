"""DiLoCo: torchft's replicas follow the paper's algorithm and listen on loopback only."""

from __future__ import annotations

import pytest

from tests.listening import watched
from tests.ranks.conftest import RunCells, cell
from tests.ranks.test_strategies import states_follow_the_formula

pytest.importorskip("torchft")


def test_it_is_the_papers_algorithm_on_loopback_alone(run_cells: RunCells) -> None:
    trained = cell("diloco", options={"period": 3}, timed_steps=7, parity_steps=10)
    with watched() as seen:
        row = run_cells(trained).trials.iloc[0]
    assert (row["status"], row["parity_verdict"]) == ("ok", "exact"), row["log_tail"]
    states_follow_the_formula(row)
    assert seen.inside, "without listening replicas this proves nothing"
    assert seen.outside == []


def test_outer_steps_to_the_mean_are_the_same_training(run_cells: RunCells) -> None:
    """If updates are linear in gradients, averaging parameters after every step changes nothing."""
    options = {"period": 1, "outer_learning_rate": 1.0, "outer_momentum": 0.0}
    row = run_cells(cell("diloco", optimizer="sgd", options=options)).trials.iloc[0]
    assert (row["status"], row["parity_verdict"]) == ("ok", "exact"), row["reason"]
