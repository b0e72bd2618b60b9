"""DiLoCo: torchft's replicas do what the paper says, and meet where nobody else hears them."""

from __future__ import annotations

import pytest

from harness.spec.cell import Cell
from harness.spec.errors import Refused
from harness.workloads import make_workload, prepare_data
from tests.listening import watched
from tests.ranks.conftest import RunCells, cell
from tests.ranks.test_strategies import states_follow_the_formula

pytest.importorskip("torchft")


def simulated_losses(trained: Cell, period: int) -> list[list[float]]:
    """Losses of each replica: inner steps of the cell's optimizer on its own rows, and an outer
    step of SGD with Nesterov's momentum along the mean of where they went (arXiv 2311.08105,
    algorithm 1)."""
    import torch

    from harness.strategy.optimizers import optimizer_of

    workload = make_workload(trained.workload)
    data = prepare_data(trained.data, workload, trained.sequence_length)
    cpu = torch.device("cpu")
    shared, *replicas = (workload.build(trained.seed, cpu) for _ in range(1 + trained.devices))
    inner = [optimizer_of(trained, replica) for replica in replicas]
    outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    size = trained.global_batch // trained.devices
    losses: list[list[float]] = [[] for _ in replicas]
    for step in range(trained.warmup_steps + trained.timed_steps):
        for rank, (replica, optimizer) in enumerate(zip(replicas, inner, strict=True)):
            rows = slice(rank * size, (rank + 1) * size)
            arrays = data.batch(trained.seed, step, trained.global_batch, rows)
            inputs, labels = (torch.from_numpy(array) for array in arrays)
            loss = workload.loss(workload.logits(replica, inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[rank].append(loss.item())
        if (step + 1) % period == 0:
            locals_ = zip(*(replica.parameters() for replica in replicas), strict=True)
            for parameter, there in zip(shared.parameters(), locals_, strict=True):
                went = [parameter.detach() - one_there.detach() for one_there in there]
                parameter.grad = torch.stack(went).mean(0)
            outer.step()
            for replica in replicas:
                replica.load_state_dict(shared.state_dict())
    return losses


def test_it_is_the_papers_algorithm_on_loopback_alone(run_cells: RunCells) -> None:
    trained = cell("diloco", options={"period": 3}, timed_steps=7, parity_steps=10)
    with watched() as seen:
        results = run_cells(trained)
    row = results.trials.iloc[0]
    assert (row["status"], row["parity_verdict"]) == ("ok", "unknown"), row["log_tail"]
    steps = results.steps
    for rank, losses in enumerate(simulated_losses(trained, 3)):
        own = steps[steps["rank"] == rank].sort_values("step")["loss"]
        assert list(own) == pytest.approx(losses[-len(own) :], rel=2e-6)
    states_follow_the_formula(row)
    assert seen.inside, "replicas that never meet prove nothing"
    assert seen.outside == []


def test_outer_steps_to_the_mean_are_the_same_training(run_cells: RunCells) -> None:
    """Where the update is linear in the gradient, and at every step."""
    options = {"period": 1, "outer_learning_rate": 1.0, "outer_momentum": 0.0}
    row = run_cells(cell("diloco", optimizer="sgd", options=options)).trials.iloc[0]
    assert (row["status"], row["parity_verdict"]) == ("ok", "exact"), row["reason"]


def test_a_period_without_a_verified_outer_step_is_refused(run_cells: RunCells) -> None:
    with pytest.raises(Refused, match="outer step"):
        run_cells(cell("diloco", options={"period": 9}))


def test_an_outer_optimizer_that_does_nothing_is_seen(run_cells: RunCells) -> None:
    """Replicas that go back to where the period began have learned nothing."""
    options = {"outer_learning_rate": 1e-6, "outer_momentum": 0.0}
    axes = {"workload": "llama-micro", "timed_steps": 13, "parity_steps": 16}
    row = run_cells(cell("diloco", options=options, **axes)).trials.iloc[0]
    assert row["parity_verdict"] != "exact", row["reason"]
    assert row["parity_max_update_deviation"] > 0.5
