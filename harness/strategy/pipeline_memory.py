"""What a rank of a pipeline holds: its part of the model, and the micro-batches in flight."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from harness.spec.cell import BASELINE, Cell
from harness.spec.training import Layout
from harness.strategy.job import Job
from harness.strategy.schedules import FORWARDS_FIRST, Schedule
from harness.strategy.stage import Stage
from harness.workloads.activations import Held, sample_labels
from harness.workloads.flops import without_memory

if TYPE_CHECKING:
    from harness.workloads import Workload

Action = tuple[Literal["forward", "backward"], int, int]
"""What is done, number of the stage among the rank's own, number of the micro-batch."""


@dataclass(frozen=True)
class Part:
    """What a rank of a pipeline does: its stages, and the micro-batches that go through them."""

    schedule: Schedule
    rank: int
    ranks: int
    own: tuple[int, ...]
    """Numbers of the rank's stages."""
    micro_batches: int
    samples: int
    """Of one micro-batch."""
    tokens: int

    @property
    def count(self) -> int:
        """Stages of all ranks."""
        return self.ranks * len(self.own)


def actions(part: Part) -> Iterator[Action]:
    """The rank's forwards and backwards in torch's order.

    An interleaved 1F1B (arXiv 2104.04473, section 2.2) takes the micro-batches in rounds, as many
    in each as there are ranks, through one stage after the other.
    """
    stages, size = len(part.own), part.micro_batches
    if part.schedule not in FORWARDS_FIRST:
        size = size // max(1, size // part.ranks) if stages > 1 else 1
    rounds = [range(first, first + size) for first in range(0, part.micro_batches, size)]
    forwards = [(stage, one) for these in rounds for stage in range(stages) for one in these]
    last_first = range(stages - 1, -1, -1)
    backwards = [(stage, one) for these in rounds for stage in last_first for one in these]
    each_hop = 2 if stages > 1 else 1
    ahead = (stages - 1) * size + each_hop * (part.ranks - 1 - part.rank)
    if part.schedule in FORWARDS_FIRST:
        ahead = len(forwards)
    for number, (stage, one) in enumerate(forwards):
        yield "forward", stage, one
        if number >= ahead:
            yield "backward", *backwards[number - ahead]
    for stage, one in backwards[max(0, len(forwards) - ahead) :]:
        yield "backward", stage, one


@functools.cache
def step_bytes(workload: Workload, part: Part, recompute: str) -> int:
    """The most bytes that a rank holds in a step beside what it keeps between steps, in fp32:
    activations of the micro-batches in flight, and gradients as they come.

    Counted on tensors without memory. The last stage computes the loss of a micro-batch at the end
    of its forward, and torch keeps a stage's result until its backward.
    """
    held = Held(with_gradients=True)
    with without_memory():
        stages = [_stage(workload, index, part, recompute) for index in part.own]
        for stage in stages:
            held.watch(stage)
        tokens = workload.sample_inputs(part.samples, part.tokens)
        labels = sample_labels(workload, tokens)
        gradient = torch.zeros(part.samples, part.tokens, workload.hidden_size)
        received = {
            place: torch.zeros_like(gradient).requires_grad_()
            for place in itertools.product(range(len(stages)), range(part.micro_batches))
        }
        held.leave_out(tokens, labels, gradient, *received.values())
        results: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = {}
        with held:
            for what, number, micro_batch in actions(part):
                stage, place = stages[number], (number, micro_batch)
                if what == "forward":
                    result = stage(tokens if stage.first else received[place])
                    loss = workload.loss(result, labels) if stage.last else None
                    results[place] = (result, loss)
                    del result, loss
                    continue
                result, loss = results.pop(place)
                if loss is None:
                    result.backward(gradient)
                else:
                    loss.backward()
                del result, loss
                received[place].grad = None  # sent to the rank before
    return held.most()


def _stage(workload: Workload, index: int, part: Part, recompute: str) -> Stage:
    axes = {"workload": workload.name, "sequence_length": part.tokens, "recompute": recompute}
    cell = Cell.model_validate({"strategy": BASELINE, **axes})
    job = Job(cell, workload.countable(), Layout(), torch.device("cpu"), 0, Path())
    return Stage(job, index, part.count)
