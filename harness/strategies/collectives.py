"""torch.distributed collectives by hand: gradients averaged after backward, or parameters after
local steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from harness.spec.cell import Cell
from harness.spec.errors import Refused
from harness.spec.training import EXACT, Batch, Layout, Tolerance, TrainStep
from harness.strategy.base import Strategy
from harness.strategy.formulas import all_reduced
from harness.strategy.job import Job
from harness.strategy.step import standard_step

if TYPE_CHECKING:
    from torch import Tensor

    from harness.workloads import Workload
    from harness.workloads.counts import ModelFacts

REASON = (
    "ranks step on their own gradients and average their parameters: the optimizer sees other"
    " gradients"
)
# Ranks that never average end at 0.8 to 1.2 of the update under AdamW.
LOCAL = {"adamw": Tolerance(0.3, 0.75, REASON), "sgd": Tolerance(0.3, 1.5, REASON)}


class Collectives(Strategy):
    """torch.distributed collectives by hand: averages gradients, or parameters after local steps,
    one tensor at a time.

    Averaging parameters after every step is the same training where the update is linear in the
    gradient (SGD with momentum). AdamW divides by the root of the squared gradient, and a mean of
    quotients is no quotient of means.
    """

    average: Literal["gradients", "parameters"] = "gradients"
    """What is averaged: gradients before the update, or parameters after it."""
    period: int = Field(default=1, ge=1)
    """Steps between two averages of parameters."""

    @property
    def cycle(self) -> int:
        return self.period

    def check(self, cell: Cell, workload: Workload) -> None:
        if self.average == "gradients" and self.period > 1:
            raise Refused(
                f"gradients are averaged at every step: period={self.period} goes with"
                " average=parameters only"
            )

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        linear = cell.optimizer == "sgd" and self.period == 1
        return (
            EXACT
            if self.average == "gradients" or linear or cell.devices == 1
            else LOCAL[cell.optimizer]
        )

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        return (
            all_reduced(layout.data, facts.trained_bytes) if self.average == "gradients" else None
        )

    def setup(self, job: Job) -> TrainStep:
        import torch.distributed as dist

        model = job.model()
        parameters = list(model.parameters())
        for parameter in parameters:
            dist.broadcast(parameter.detach(), 0)

        def average(tensors: Iterable[Tensor | None]) -> None:
            for tensor in tensors:
                if tensor is not None:
                    dist.all_reduce(tensor)
                    tensor /= job.cell.devices

        optimizer = job.optimizer(parameters)
        job.register(model, optimizer)
        if self.average == "gradients":
            return standard_step(
                job, model, optimizer, before_update=lambda: average(p.grad for p in parameters)
            )
        local = standard_step(job, model, optimizer)

        def step(batch: Batch) -> Tensor | None:
            loss = local(batch)
            if (batch.step + 1) % self.period == 0:
                average(p.detach() for p in parameters)
            return loss

        return step
