"""The bubble of each schedule by its closed form is that of torch's own order of passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.pipelining.schedules import _ComputationType

from harness.cell.cell import Cell
from harness.cell.schedules import V_SHAPED, bubble_theory
from harness.seam.pipelining import SCHEDULES

FORWARD, BACKWARD = _ComputationType.FORWARD, _ComputationType.FULL_BACKWARD
INPUT, WEIGHT = _ComputationType.BACKWARD_INPUT, _ComputationType.BACKWARD_WEIGHT
SECONDS = {FORWARD: 1, INPUT: 1, WEIGHT: 1, BACKWARD: 2}


class FakeStage:
    """What a schedule reads of a stage when it is created."""

    def __init__(self, index: int, ranks: int, v_shaped: bool) -> None:
        count = 2 * ranks
        self.stage_index, self.num_stages, self.group_size = index, count, ranks
        self.group_rank, self.group, self.device = 0, None, "cpu"
        self.is_first, self.is_last, self.has_backward = index == 0, False, True
        self.submod = torch.nn.Identity()
        self.stage_index_to_group_rank = {
            n: min(n, count - 1 - n) if v_shaped else n % ranks for n in range(count)
        }


def simulated(schedule: str, ranks: int, micro_batches: int) -> float:
    """Returns the idle share of ranks that follow torch's order, if each pass takes a second."""
    stages: Any = [FakeStage(n * ranks, ranks, schedule in V_SHAPED) for n in range(2)]
    made = SCHEDULES[schedule](stages, micro_batches, loss_fn=lambda *_: None)
    orders: dict[int, list[Any]] = {
        rank: [part for action in actions if action for part in action.sub_actions or (action,)]
        for rank, actions in made.pipeline_order.items()
    }
    ended: dict[tuple[int, Any, int], int] = {}
    clock = dict.fromkeys(orders, 0)
    busy = sum(SECONDS[action.computation_type] for order in orders.values() for action in order)
    while any(orders.values()):
        for rank, order in orders.items():
            while order:
                stage, kind, number = order[0][:3]
                needed = [(stage, INPUT, number)] if kind == WEIGHT else []
                if kind == FORWARD and stage:
                    needed = [(stage - 1, FORWARD, number)]
                elif kind in (BACKWARD, INPUT):
                    needed = [(stage, FORWARD, number)]
                    needed += [(stage + 1, INPUT, number)] if stage < 2 * ranks - 1 else []
                if not all(one in ended for one in needed):
                    break
                clock[rank] = max(clock[rank], *(ended[one] for one in needed), 0) + SECONDS[kind]
                ended[stage, INPUT if kind == BACKWARD else kind, number] = clock[rank]
                order.pop(0)
    return 1 - busy / len(clock) / max(clock.values())


@pytest.mark.parametrize(
    "schedule", ["interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", *V_SHAPED]
)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_a_closed_form_is_what_torchs_order_takes(schedule: str, ranks: int, rounds: int) -> None:
    micro_batches = rounds * ranks
    cell = Cell(strategy="any", options={"schedule": schedule}, micro_batches=micro_batches)
    theory = bubble_theory(cell, ranks)
    assert (theory is None) == (schedule in V_SHAPED and rounds == 1)
    if theory is not None:
        assert simulated(schedule, ranks, micro_batches) == pytest.approx(theory)


def test_gpipe_and_1f1b_have_the_bubble_of_one_stage_per_rank() -> None:
    """A cell without a schedule passes its whole batch from stage to stage."""
    for options in ({"schedule": "gpipe"}, {"schedule": "1f1b"}, {}):
        cell = Cell(strategy="any", options=options, micro_batches=4)
        assert bubble_theory(cell, 2) == pytest.approx(1 / 5)
    assert bubble_theory(Cell(strategy="any"), 4) == pytest.approx(3 / 4)
