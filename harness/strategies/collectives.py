from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from harness.cell.errors import Refused
from harness.cell.training import EMULATED, EXACT, Batch, Layout, Tolerance, TrainStep
from harness.seam import Cell, Job, ModelFacts, Strategy
from harness.seam.formulas import all_reduced
from harness.seam.job import standard_step, trained_parameters
from harness.strategies._replicas import replicas_of
from harness.workloads import Workload

if TYPE_CHECKING:
    from torch import Tensor, nn


class Collectives(Strategy):
    """Hand-written collectives that average gradients, or parameters after local steps.

    Averaging parameters after every step is equivalent only if the update is linear in the
    gradient, as SGD's is, but not AdamW's or a clipped one.
    """

    average: Literal["gradients", "parameters"] = "gradients"
    """What to average: gradients before the update, or parameters after it."""
    period: int = Field(default=1, ge=1)
    """Steps between parameter averages."""

    @property
    def cycle(self) -> int:
        return self.period

    def check(self, cell: Cell, workload: Workload) -> None:
        if self.average == "parameters" and cell.checkpoint != "none":
            raise Refused(
                "between averages every rank has different parameters, and torch would save only"
                " one rank's; use average gradients, or post_local_sgd"
            )
        if self.average == "parameters" and self.period > cell.parity_steps:
            raise Refused(
                f"period={self.period}: none of the {cell.parity_steps} verified steps would end"
                " with an average; choose a shorter one"
            )
        if self.average == "gradients" and self.period > 1:
            only = f"period={self.period} needs average=parameters"
            raise Refused(f"gradients are averaged at every step: {only}")

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        return EXACT if self.average == "gradients" else EMULATED

    def reference(self, cell: Cell) -> Cell:
        if self.average == "gradients":
            return cell.reference()
        return replicas_of(cell, self.period, self.period - 1)

    def setup(self, job: Job) -> TrainStep:
        model = job.model()
        parameters = list(model.parameters())
        broadcast(parameters)
        optimizer = job.optimizer(parameters)
        job.register(model, optimizer)
        if self.average == "gradients":
            gradients = functools.partial(average_gradients, parameters)
            return standard_step(job, model, optimizer, before_update=gradients)
        local = standard_step(job, model, optimizer)

        def step(batch: Batch) -> Tensor | None:
            loss = local(batch)
            if (batch.step + 1) % self.period == 0:
                average([p.detach() for p in trained_parameters(model)])
            return loss

        return step

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        if self.average == "parameters":
            return None
        return all_reduced(layout.data, facts.trained_bytes)


def broadcast(parameters: Iterable[nn.Parameter]) -> None:
    import torch.distributed as dist

    for parameter in parameters:
        dist.broadcast(parameter.detach(), 0)


def average(tensors: Iterable[Tensor]) -> None:
    import torch.distributed as dist

    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    average([p.grad for p in parameters if p.grad is not None])
