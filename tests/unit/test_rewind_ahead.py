"""Replays with optimizers moved ahead, which expose errors tied to a step number."""

from __future__ import annotations

import torch

from harness.cell.cell import Cell
from harness.run.references import _without_ahead
from harness.seam.job import TrainState
from harness.worker.rewind import AHEAD, MemoryCheckpoint, Rewinds, numbers_steps

CELL = Cell(strategy="ddp", workload="llama-nano", devices=2)


def trained(steps: int, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> TrainState:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    state = TrainState(model, (optimizer,))
    further(state, steps)
    return state


def further(state: TrainState, steps: int) -> None:
    for _ in range(steps):
        state.model(torch.ones(1, 4)).sum().backward()
        state.optimizers[0].step()
        state.optimizers[0].zero_grad()


def steps_of(state: TrainState) -> set[int]:
    return {int(of_parameter["step"]) for of_parameter in state.optimizers[0].state.values()}


def test_a_restored_optimizer_may_count_from_further_on() -> None:
    state = trained(5)
    before = [p.detach().clone() for p in state.model.parameters()]
    saved = MemoryCheckpoint(state)
    for ahead in (0, AHEAD, 0):
        further(state, 3)
        saved.restore(state, ahead)
        assert steps_of(state) == {5 + ahead}
        assert all(torch.equal(a, b) for a, b in zip(before, state.model.parameters(), strict=True))


def test_only_optimizers_that_number_their_steps_go_ahead() -> None:
    assert numbers_steps(trained(2), CELL)
    hidden = trained(2)
    for of_parameter in hidden.optimizers[0].state.values():
        del of_parameter["step"]
    assert not numbers_steps(hidden, CELL)
    assert not numbers_steps(trained(2), CELL.model_copy(update={"optimizer": "sgd"}))


def test_a_replay_ahead_is_followed_by_one_that_is_not() -> None:
    state = trained(5)
    rewinds = Rewinds(seed=0, parity_steps=8, cycle=1, ahead=True)
    rewinds.keep(state, CELL, 5)
    for number in range(8, 60):
        if rewinds.due(number, 100):
            rewinds.rewind(state)
            assert steps_of(state) == {5 + AHEAD * rewinds.is_ahead}
            if rewinds.is_ahead:
                assert rewinds.due(number + 3, 100), "the next steps differ from the reference"
    assert rewinds.replays_ahead[:4] == [True, False, True, False]
    assert rewinds.enough


def test_the_norms_of_replays_ahead_are_not_compared() -> None:
    steps = [0, 1, 2, 3, 4, 2, 3, 2, 3, 4]
    assert _without_ahead(steps, [True, False], 4) == [0, 1, 2, 3, 4, 6, 7, 2, 3, 4]
    assert _without_ahead([None, None, 2], [], 4) == [0, 1, 2]
