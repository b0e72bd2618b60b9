"""The parameter server: exact synchronous and declared asynchronous training, bytes, failures."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from harness.host import cores
from tests.ranks.conftest import RunCells, cell, representative
from tests.ranks.test_strategies import states_follow_the_formula

LONG = {"timed_steps": 10, "parity_steps": 13}


@pytest.mark.parametrize("workers", representative([2, 4]))  # matrix full covers one
def test_synchronous_is_the_same_training(run_cells: RunCells, workers: int) -> None:
    """Each worker sends its gradients and gets the parameters, P bytes each. Only the server keeps
    optimizer state."""
    results = run_cells(
        cell("parameter_server", workers, "llama-micro", options={"transport": "tcp"})
    )
    row = results.trials.iloc[0]
    assert row["parity_verdict"] == "exact", row["reason"]
    assert row["parity_max_loss_deviation"] <= 1e-6
    whole = 4 * row["trained_parameters"]
    assert list(row["sent_bytes_per_step"]) == pytest.approx(
        [whole] * workers + [workers * whole], rel=0.03
    )
    assert row["processes"] == workers + 1
    assert set(row["held_parameters"]) == {row["parameters"]}
    assert list(row["optimizer_bytes"][:-1]) == [0] * workers
    states_follow_the_formula(row)
    steps = results.steps
    assert steps[steps["rank"] == workers]["loss"].isna().all()
    assert steps[steps["rank"] < workers]["loss"].notna().all()


@pytest.mark.parametrize(
    "axes",
    representative(
        [{"micro_batches": 2}, {"optimizer": "sgd"}, {"precision": "bf16"}, {"precision": "fp16"}]
    ),
    ids=str,
)
def test_it_trains_the_same_on_other_axes(run_cells: RunCells, axes: dict[str, Any]) -> None:
    row = run_cells(cell("parameter_server", **axes)).trials.iloc[0]
    assert (row["status"], row["reason"]) == ("ok", "")
    assert row["parity_verdict"] == ("within tolerance" if "precision" in axes else "exact")
    assert len(row["sent_bytes_per_step"]) == 0  # shared memory sends none


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


def test_asynchronous_with_one_worker_is_the_same_training(run_cells: RunCells) -> None:
    row = run_cells(cell("parameter_server", 1, options={"mode": "asynchronous"})).trials.iloc[0]
    assert row["parity_verdict"] == "exact"


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
@pytest.mark.parametrize("trap", ["never_fetches", "deaf_to_one"])
def test_what_it_declares_hides_no_mistake(run_cells: RunCells, mode: str, trap: str) -> None:
    options = {"mode": mode, "trap": trap}
    row = run_cells(
        cell("parameter_server_traps", workload="llama-micro", options=options, **LONG)
    ).trials.iloc[0]
    assert row["status"] == "diverged", row["reason"]


@pytest.mark.parametrize("fault", representative(["raises", "killed"]))
@pytest.mark.parametrize("rank", [0, 2], ids=["worker", "server"])
def test_one_that_fails_ends_the_trial(run_cells: RunCells, fault: str, rank: int) -> None:
    row = run_cells(
        cell("parameter_server_faulty", options={"fault": fault, "rank": rank})
    ).trials.iloc[0]
    assert row["status"] == "failed"
    assert row["reason"].startswith(
        f"rank {rank}: ValueError: the planted"
        if fault == "raises"
        else f"rank {rank} was killed by SIGKILL"
    )
    assert row["wall_seconds"] < 30


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
