"""Memory of a pipeline rank: its part of the model, and the micro-batches in flight."""

from __future__ import annotations

from typing import Any

import pytest

from harness.spec.cell import Cell
from harness.strategy.formulas import facts_of_stages, unit_sizes
from harness.strategy.pipeline_memory import Engine, PipelineRank, actions, step_bytes
from harness.strategy.pipelining import SCHEDULES
from harness.strategy.registry import make_strategy
from harness.strategy.schedules import Schedule
from harness.workloads import make_workload
from harness.workloads.counts import model_facts


def part(
    schedule: Schedule, rank: int, ranks: int, stages: int, micro_batches: int
) -> PipelineRank:
    own = tuple(range(rank, ranks * stages, ranks))
    return PipelineRank(Engine(schedule), rank, ranks, own, micro_batches, samples=1, tokens=8)


def torchs_order(one: PipelineRank) -> list[tuple[str, int, int]]:
    """Returns the rank's actions under torch's schedule for several stages."""
    from torch.distributed.pipelining import schedules

    made: Any = SCHEDULES[one.engine.schedule].__new__(SCHEDULES[one.engine.schedule])
    made._stages, made.n_local_stages = list(one.own), len(one.own)
    made.pp_group_size, made._n_microbatches = one.ranks, one.micro_batches
    made.number_of_rounds = max(1, one.micro_batches // one.ranks)
    made.microbatches_per_round = one.micro_batches // made.number_of_rounds
    done = [action for action in made._calculate_single_rank_operations(one.rank) if action]
    names = {schedules._ComputationType.FORWARD: "forward"}
    return [
        (
            names.get(action.computation_type, "backward"),
            one.own.index(action.stage_index),
            action.microbatch_index,
        )
        for action in done
    ]


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (2, 8), (4, 8), (4, 4)])
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "looped_bfs"])
def test_the_order_is_torchs(schedule: Schedule, ranks: int, micro_batches: int) -> None:
    for rank in range(ranks):
        one = part(schedule, rank, ranks, 2, micro_batches)
        own, torchs = list(actions(one)), torchs_order(one)
        assert sorted(own) == sorted(torchs)
        if schedule == "interleaved_1f1b":  # looped_bfs frees as much in another order
            assert own == torchs


def test_the_order_of_1f1b_by_hand() -> None:
    first = [(what[0], one) for what, _, one in actions(part("1f1b", 0, 2, 1, 3))]
    assert first == [("f", 0), ("f", 1), ("b", 0), ("f", 2), ("b", 1), ("b", 2)]
    last = [(what[0], one) for what, _, one in actions(part("1f1b", 1, 2, 1, 2))]
    assert last == [("f", 0), ("b", 0), ("f", 1), ("b", 1)]


@pytest.mark.parametrize(("workload", "copies"), [("llama-micro", 0), ("gpt2-micro", 256 * 128)])
def test_stages_are_the_whole_model(workload: str, copies: int) -> None:
    """Stages add a copy of the tied embedding, unless one rank has both ends."""
    made = make_workload(workload)
    facts = model_facts(made, 32)

    def parameters(*own: int) -> int:
        of_rank = facts_of_stages(made, facts, own, 4)
        assert of_rank is not None
        return of_rank.parameters

    assert sum(map(parameters, range(4))) == facts.parameters + copies
    assert parameters(0, 3) + parameters(1, 2) == facts.parameters


def test_more_micro_batches_in_flight_hold_more() -> None:
    """GPipe holds all four micro-batches, 1F1B two."""
    held = {}
    for schedule in ("gpipe", "1f1b"):
        cell = Cell(
            strategy="pipeline",
            devices=2,
            workload="llama-micro",
            micro_batches=4,
            options={"schedule": schedule},
        )
        strategy = make_strategy(cell)
        held[schedule] = strategy.costs.activation_bytes(
            cell, strategy.layout(2), make_workload(cell.workload)
        )
    assert held["gpipe"] is not None
    assert held["1f1b"] is not None
    assert 1.5 < held["gpipe"] / held["1f1b"] < 2.2


def test_gathered_blocks_of_a_pipeline_stay_until_its_last_micro_batch() -> None:
    """The peak is in the loss, when all four blocks of the last stage would be freed otherwise."""
    workload = make_workload("llama-64x8")
    stays, freed = (
        step_bytes(workload, PipelineRank(engine, 1, 2, (1,), 1, 4, 64), "none")
        for engine in (Engine("gpipe", 1, 2, reshards) for reshards in (False, True))
    )
    block = unit_sizes(workload, model_facts(workload, 64))["model.layers.7"]
    assert stays - freed == pytest.approx(4 * 4 * block, rel=0.05)


def test_gradients_apart_have_no_formula() -> None:
    cell = Cell(strategy="pipeline", devices=2, micro_batches=4, options={"schedule": "zbv"})
    strategy = make_strategy(cell)
    workload = make_workload(cell.workload)
    assert strategy.costs.activation_bytes(cell, strategy.layout(2), workload) is None


@pytest.mark.parametrize("workload", ["llama-nano", "gpt2-nano"])
def test_a_rank_of_tensor_parallelism_has_its_share_of_each_layer(workload: str) -> None:
    """A rank has the weights that remain in a model split for two ranks."""
    import torch

    cell = Cell(strategy="tensor", devices=2, workload=workload)
    made, strategy = make_workload(workload), make_strategy(cell)
    states = strategy.costs.states(cell, strategy.layout(2), model_facts(made, 32))
    assert states is not None
    assert made.split is not None
    model = made.build(0)
    made.split.leave_a_share(model, 2)
    assert states.parameters == sum(4 * parameter.numel() for parameter in model.parameters())
    inputs = torch.zeros(1, 32, dtype=torch.long)
    assert made.logits(model, inputs).shape == (1, 32, 256)
