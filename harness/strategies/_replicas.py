from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from harness.cell.training import Batch, TrainStep
from harness.seam import Capabilities, Cell, Emulation, Job
from harness.seam.checkpoints import moments_of
from harness.seam.job import (
    Moment,
    TrainState,
    backward_of,
    loss_scaler,
    trained_parameters,
    update_of,
)
from harness.seam.recipe import RecipeState
from harness.seam.registry import REPLICAS

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


class Replicas(Emulation):
    """Replicas that train one after the other, each on its part of the batch, and are averaged.

    With an outer learning rate, an outer SGD steps instead, and all continue from its result. Its
    gradient is the mean of (starting point - replica).
    """

    capabilities = Capabilities(process_group=False)

    replicas: int = Field(ge=1)
    first_local: int = 0
    """First step whose gradients are not averaged."""
    first_average: int
    """First step after which parameters are averaged."""
    period: int = Field(ge=1)
    """Steps between averages."""
    outer_learning_rate: float | None = None
    """Learning rate of the outer optimizer; None to average parameters."""
    outer_momentum: float = 0.0
    """Nesterov momentum of the outer optimizer."""

    @property
    def emulated_ranks(self) -> int:
        return self.replicas

    def ranks_agree(self, step: int) -> bool:
        return step < self.first_local or self.averages_after(step)

    def averages_after(self, step: int) -> bool:
        return step >= self.first_average and (step - self.first_average) % self.period == 0

    def setup(self, job: Job) -> TrainStep:
        import torch

        parts = job.cell.micro_batches // self.replicas
        cell = job.cell.model_copy(update={"micro_batches": parts})
        jobs = [dataclasses.replace(job, cell=cell)]
        for _ in range(1, self.replicas):
            recipe = RecipeState(schedulers=job.recipe.schedulers)
            jobs.append(dataclasses.replace(jobs[0], recipe=recipe))
        models = [replica_job.model() for replica_job in jobs]
        optimizers = [
            replica_job.optimizer(model.parameters())
            for replica_job, model in zip(jobs, models, strict=True)
        ]
        trained = [trained_parameters(model) for model in models]
        outer = None if self.outer_learning_rate is None else self._outer(trained[0])
        first, *others = (
            _state(model, optimizer, outer)
            for model, optimizer in zip(models, optimizers, strict=True)
        )
        registered = job.register(first.model, optimizers[0], *([outer] if outer else []))
        registered.moments = first.moments
        registered.replicas = others
        scalers = [loss_scaler(replica_job) for replica_job in jobs]
        backwards = list(map(backward_of, jobs, models, scalers))
        updates = list(map(update_of, jobs, optimizers, scalers))

        def step(batch: Batch) -> Tensor:
            shares = zip(backwards, batch.split(self.replicas), strict=True)
            losses = [backward(share) for backward, share in shares]
            if batch.step < self.first_local:
                average(
                    [[p.grad for p in replica_job if p.grad is not None] for replica_job in trained]
                )
            for update in updates:
                update()
            if self.averages_after(batch.step):
                step_outside(outer, trained) if outer else average(trained)
            return torch.stack(losses).mean()

        return step

    def _outer(self, parameters: Sequence[Tensor]) -> Optimizer:
        from torch.optim import SGD

        starts = [parameter.detach().clone() for parameter in parameters]
        assert self.outer_learning_rate is not None
        momentum = self.outer_momentum
        return SGD(starts, self.outer_learning_rate, momentum=momentum, nesterov=momentum > 0)


def replicas_of(
    cell: Cell,
    period: int,
    first_average: int,
    first_local: int = 0,
    outer: tuple[float, float] | None = None,
) -> Cell:
    """Returns the reference of a cell whose ranks train locally. `outer`: learning rate and
    momentum of the outer optimizer; None to average parameters."""
    options: dict[str, float] = {
        "replicas": cell.devices,
        "first_local": first_local,
        "first_average": first_average,
        "period": period,
    }
    if outer:
        options["outer_learning_rate"], options["outer_momentum"] = outer
    reference = cell.reference(REPLICAS, options)
    return reference.model_copy(update={"micro_batches": cell.devices})


def average(replicas: Sequence[Sequence[Tensor]]) -> None:
    import torch

    with torch.no_grad():
        for copies in zip(*replicas, strict=True):
            mean = torch.stack(copies).mean(0)
            for copy in copies:
                copy.copy_(mean)


def step_outside(outer: Optimizer, replicas: Sequence[Sequence[Tensor]]) -> None:
    """Steps the outer optimizer from the period's starting point; all replicas get the result."""
    import torch

    starts = outer.param_groups[0]["params"]
    with torch.no_grad():
        for start, *copies in zip(starts, *replicas, strict=True):
            start.grad = torch.stack([start - copy for copy in copies]).mean(0)
        outer.step()
        for start, *copies in zip(starts, *replicas, strict=True):
            for copy in copies:
                copy.copy_(start)


def _state(model: nn.Module, optimizer: Optimizer, outer: Optimizer | None) -> TrainState:
    def moments() -> Iterator[Moment]:
        yield from moments_of(model.named_parameters(), [optimizer])
        if outer:
            names = (name for name, p in model.named_parameters() if p.requires_grad)
            starts = outer.param_groups[0]["params"]
            shared = moments_of(zip(names, starts, strict=True), [outer])
            # Replicas share these, and a file cannot hold a tensor twice.
            yield from ((name, kind, tensor.clone()) for name, kind, tensor in shared)

    return TrainState(model, [optimizer], moments=moments)
