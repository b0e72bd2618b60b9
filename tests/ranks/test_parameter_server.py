"""The parameter server: exact synchronous and declared asynchronous training, bytes, failures."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from harness.host import cores
from tests.ranks.conftest import RunCells, cell, representative

LONG = {"timed_steps": 10, "parity_steps": 13}


@pytest.mark.parametrize(
    "axes",
    representative([{}, {"devices": 4}, {"optimizer": "sgd", "learning_rate": 0.003}]),
    ids=str,
)
def test_asynchronous_stays_near(run_cells: RunCells, axes: dict[str, Any]) -> None:
    row = run_cells(
        cell(
            "parameter_server",
            workload="llama-micro",
            options={"mode": "asynchronous"},
            **LONG,
            **axes,
        )
    ).trials.iloc[0]
    assert row["status"] == "ok", row["reason"]
    assert row["parity_verdict"] in ("within tolerance", "unknown"), row["parity_reason"]
    assert row["parity_max_loss_deviation"] > 1e-3


def test_no_worker_is_heard_twice_in_a_step() -> None:
    from harness.strategies import parameter_server as calls

    def sent(*workers: int) -> None:
        for worker in workers:
            calls._PUSHED.put((worker, [], Future()))

    early: list[calls.Push] = []
    sent(1, 1, 0)
    assert [one[0] for one in calls.arrivals(2, early)] == [1, 0]
    assert [one[0] for one in early] == [1]
    sent(0)
    assert [one[0] for one in calls.arrivals(2, early)] == [1, 0]
    assert not early


def test_a_server_has_a_core_and_counts_as_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "allowed_cores", lambda: [0, 1])
    two, one = cell("parameter_server"), cell("data_parallel")
    assert cores.pin(two, 3, 3) == ((0,), (1,), (0,))
    assert cores.pin(one, 1, 1) == ((0, 1),)
    assert cores.oversubscribed(two, 2, 3)
    assert not cores.oversubscribed(two, 2, 2)
