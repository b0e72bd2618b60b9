from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from harness.spec.cell import BASELINE, Cell
from harness.spec.training import Layout
from harness.strategy.formulas import KEPT_RESULTS, facts_of_stages, logits_bytes
from harness.strategy.job import Job
from harness.strategy.pipelining import Stage
from harness.strategy.schedules import FORWARDS_FIRST, Schedule
from harness.workloads.counts import model_facts, without_memory
from harness.workloads.operators import Held

if TYPE_CHECKING:
    from harness.workloads import Workload

Action = tuple[Literal["forward", "backward"], int, int]
"""Kind of action, stage index within the rank, and micro-batch number."""


@dataclass(frozen=True)
class Engine:
    """A pipeline runtime, and what it keeps beyond autograd."""

    schedule: Schedule
    tensor_ranks: int = 1
    """Ranks that split each layer of a stage."""
    shards: int = 0
    """Ranks over which FSDP2 shards the stage's parameters; 0 for none. Gradients are whole until
    the last micro-batch ends."""
    reshards: bool = True
    """Whether FSDP2 frees a gathered block after forward and gathers it again for backward (with
    several ranks, one block ahead), where it stays until the next forward."""
    copies_inputs: bool = False
    """Whether stages work like DeepSpeed's: copy inputs twice, free sent tensors at once, and keep
    the last results until replaced."""

    def keeps_sent(self, what: str, micro_batch: int, ahead: int) -> bool:
        """Returns whether a sent tensor stays in memory until torch frees messages, at the step's
        end.

        1F1B frees each before it sends the next, except the last of the `ahead` forwards (PyTorch
        2.13, pipelining/schedules.py).
        """
        if self.copies_inputs:
            return False
        return self.schedule != "1f1b" or (what == "forward" and micro_batch == ahead - 1)


@dataclass(frozen=True)
class PipelineRank:
    engine: Engine
    rank: int
    ranks: int
    own: tuple[int, ...]
    micro_batches: int
    samples: int
    """Samples per micro-batch."""
    tokens: int

    @property
    def count(self) -> int:
        return self.ranks * len(self.own)


def actions(part: PipelineRank) -> Iterator[Action]:
    """Yields the rank's forwards and backwards in torch's order.

    Interleaved 1F1B (arXiv 2104.04473, section 2.2) runs rounds of one micro-batch per rank.
    """
    stages, size = len(part.own), _micro_batches_of_round(part)
    rounds = [range(first, first + size) for first in range(0, part.micro_batches, size)]
    forwards = [(stage, one) for these in rounds for stage in range(stages) for one in these]
    last_first = range(stages - 1, -1, -1)
    backwards = [(stage, one) for these in rounds for stage in last_first for one in these]
    ahead = _ahead(part)
    for number, (stage, one) in enumerate(forwards):
        yield "forward", stage, one
        if number >= ahead:
            yield "backward", *backwards[number - ahead]
    for stage, one in backwards[max(0, len(forwards) - ahead) :]:
        yield "backward", stage, one


def _micro_batches_of_round(part: PipelineRank) -> int:
    if part.engine.schedule in FORWARDS_FIRST:
        return part.micro_batches
    if len(part.own) == 1:
        return 1
    return part.micro_batches // max(1, part.micro_batches // part.ranks)


def _ahead(part: PipelineRank) -> int:
    """Counts warm-up forwards, before forwards and backwards alternate."""
    if part.engine.schedule in FORWARDS_FIRST:
        return len(part.own) * part.micro_batches
    each_hop = 2 if len(part.own) > 1 else 1
    further_stages = (len(part.own) - 1) * _micro_batches_of_round(part)
    return further_stages + each_hop * (part.ranks - 1 - part.rank)


def held_with_gradients(
    cell: Cell, layout: Layout, workload: Workload, own: Sequence[tuple[int, ...]], engine: Engine
) -> float | None:
    """Returns a rank's peak fp32 bytes of activations and gradients in a step, without retained
    states and `States.transient`.

    `own`: each rank's stages. None if the model has no split or is not fully trained.
    """
    if workload.pretrained or workload.partly_frozen:
        return None
    facts, count, most = model_facts(workload, cell.sequence_length), sum(map(len, own)), 0.0
    samples = cell.global_batch // layout.data // cell.micro_batches
    for rank, stages in enumerate(own):
        of_rank = facts_of_stages(workload, facts, stages, count, engine.tensor_ranks)
        if of_rank is None:
            return None
        size = (cell.micro_batches, samples, cell.sequence_length)
        part = PipelineRank(engine, rank, len(own), stages, *size)
        taken = of_rank.trained_bytes / max(1, engine.shards)
        most = max(most, step_bytes(workload, part, cell.recompute) - taken)
    return most


@functools.cache
def step_bytes(workload: Workload, part: PipelineRank, recompute: str) -> int:
    """Returns a rank's peak fp32 bytes in a step, without what it keeps between steps.

    Counts activations, gradients, gathered parameters and engine buffers on fake tensors.
    """
    held, engine = Held(with_gradients=True), part.engine
    with without_memory():
        stages = [_stage(workload, index, part, recompute) for index in part.own]
        for stage in stages:
            held.watch(stage)
            if engine.shards:
                _gather_when_needed(stage, engine.reshards, ahead=engine.shards > 1)
        run = _Run(workload, part, stages, held)
        with held:
            run.begin()
            before_the_step = held.most()
            for action in actions(part):
                run.do(*action)
    return held.most() - before_the_step


class _Run:
    def __init__(
        self, workload: Workload, part: PipelineRank, stages: Sequence[Stage], held: Held
    ) -> None:
        self.workload, self.part, self.stages = workload, part, stages
        self.tokens = workload.sample_inputs(part.samples, part.tokens)
        self.labels = workload.sample_labels(self.tokens)
        self.gradient = torch.zeros(part.samples, part.tokens, workload.hidden_size)
        places = itertools.product(range(len(stages)), range(part.micro_batches))
        self.received = {
            place: torch.zeros_like(self.gradient).requires_grad_() for place in places
        }
        held.leave_out(self.tokens, self.labels, self.gradient, *self.received.values())
        self.results: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = {}
        self.sent: list[Tensor] = []
        self.kept: list[Tensor] = []

    def begin(self) -> None:
        if self.part.engine.copies_inputs and self.stages[-1].last:
            part = self.part
            elements = round(logits_bytes(self.workload, part.samples, part.tokens)) // 4
            kept = min(KEPT_RESULTS, part.micro_batches)
            self.kept = [torch.zeros(elements) for _ in range(kept)]

    def do(self, what: str, number: int, micro_batch: int) -> None:
        stage, place = self.stages[number], (number, micro_batch)
        if what == "forward":
            self._forward(stage, place)
        else:
            self._backward(stage, place)

    def _forward(self, stage: Stage, place: tuple[int, int]) -> None:
        part = self.part
        if stage.first:
            inputs = self.tokens
        elif part.engine.copies_inputs:
            self.received[place] = torch.zeros_like(self.gradient).requires_grad_()
            inputs = self.received[place].clone()
        else:
            inputs = self.received[place]
        result = stage(inputs)
        loss = self.workload.loss(result, self.labels) if stage.last else None
        if self.kept and stage.last:
            self.kept[place[1] % len(self.kept)] = result
        self.results[place] = (result, loss)
        if not stage.last and part.engine.keeps_sent("forward", place[1], _ahead(part)):
            self.sent.append(result.detach())

    def _backward(self, stage: Stage, place: tuple[int, int]) -> None:
        part = self.part
        result, loss = self.results.pop(place)
        if loss is None:
            result.backward(self.gradient)
        else:
            loss.backward()
        received = self.received[place]
        if received.grad is None:
            return
        if part.engine.keeps_sent("backward", place[1], _ahead(part)):
            self.sent.append(received.grad)
        if part.engine.copies_inputs:
            del self.received[place]
        else:
            received.grad = None


def _gather_when_needed(stage: Stage, reshards: bool, ahead: bool) -> None:
    """Imitates FSDP2's gathers (see `Engine.reshards`), prefetching in backward if `ahead`."""
    gathered: dict[nn.Module, Tensor] = {}
    blocks = stage.blocks
    of_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}

    def gather(module: nn.Module, *_: object) -> None:
        if module not in gathered:
            own = [p for p in module.parameters() if module in blocks or id(p) not in of_blocks]
            gathered[module] = torch.empty(sum(parameter.numel() for parameter in own))

    def gather_for_backward(block: nn.Module, *_: object) -> None:
        gather(block)
        if ahead and block is not blocks[0]:
            gather(blocks[blocks.index(block) - 1])

    def free(block: nn.Module, *_: object) -> None:
        del gathered[block]

    stage.register_forward_pre_hook(gather)
    for block in blocks:
        block.register_forward_pre_hook(gather)
        if reshards:
            block.register_forward_hook(free)
            block.register_full_backward_pre_hook(gather_for_backward)


def _stage(workload: Workload, index: int, part: PipelineRank, recompute: str) -> Stage:
    axes = {"workload": workload.name, "sequence_length": part.tokens, "recompute": recompute}
    cell = Cell.model_validate({"strategy": BASELINE, **axes})
    job = Job(cell, workload.countable(), Layout(), torch.device("cpu"), 0, Path())
    stage = Stage(job, index, part.count)
    if part.engine.tensor_ranks > 1:
        stage.split.leave_a_share(stage.model, part.engine.tensor_ranks)
    return stage
