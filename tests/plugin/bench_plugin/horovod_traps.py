"""Horovod without one of the strategy's precautions, or with a rank that fails."""

import dataclasses
import os
import signal
import time
from typing import Any, Literal

from harness.seam import Batch, Job, Strategy, TrainStep
from harness.strategies import _horovod
from harness.strategies.horovod import Horovod

WRAP = _horovod.wrap


class PlainSgd(Job):
    """A job that trains by SGD without momentum, which keeps no state."""

    def optimizer_class(self) -> tuple[Any, dict[str, Any]]:
        import torch

        return torch.optim.SGD, {
            "lr": self.cell.learning_rate,
            "weight_decay": self.cell.weight_decay,
        }


class HorovodTraps(Horovod):
    """Horovod with an easily made mistake."""

    trap: Literal["none", "state_before_wrapping", "state_after_wrapping", "no_broadcast"] = "none"
    """Replacement for the strategy's own broadcast."""
    apart: bool = False
    """Start every rank except 0 from different weights and a different learning rate."""
    plain_sgd: bool = False
    """Use SGD without momentum."""

    def wrap(self, job: Job, model: Any, fp16: bool, adasum: bool) -> Any:
        import horovod.torch as hvd
        import torch

        if self.plain_sgd:
            job = PlainSgd(
                **{field.name: getattr(job, field.name) for field in dataclasses.fields(job)}
            )
        if self.apart and job.rank:
            job = dataclasses.replace(
                job, cell=job.cell.model_copy(update={"learning_rate": 10 * job.cell.learning_rate})
            )
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
        if self.trap != "state_before_wrapping":
            return WRAP(job, model, fp16, adasum)
        optimizer = job.optimizer(model.parameters())
        broadcast_by_horovod(model, optimizer)
        return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def setup(self, job: Job) -> TrainStep:
        _horovod.wrap = self.wrap
        if self.trap == "state_after_wrapping":
            _horovod.broadcast = broadcast_by_horovod
        if self.trap == "no_broadcast":
            _horovod.broadcast = lambda model, optimizer: None
        return super().setup(job)


def broadcast_by_horovod(model: Any, optimizer: Any) -> None:
    import horovod.torch as hvd

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)


class AdasumByHand(Strategy):
    """Adasum of two ranks' updates, by its formula (arXiv 2006.02924, section 3)."""

    def setup(self, job: Job) -> TrainStep:
        import torch
        import torch.distributed as dist

        model = job.model()
        optimizer = job.optimizer(model.parameters())
        job.register(model, optimizer)

        def step(batch: Batch) -> Any:
            loss = job.loss(model, batch)
            loss.backward()
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            for parameter, start in zip(model.parameters(), before, strict=True):
                both = [torch.empty_like(start) for _ in range(2)]
                dist.all_gather(both, parameter.detach() - start)
                a, b = both
                overlap = (a * b).sum(dtype=torch.float64)
                of_a = 1 - overlap / (2 * (a * a).sum(dtype=torch.float64))
                of_b = 1 - overlap / (2 * (b * b).sum(dtype=torch.float64))
                parameter.data.copy_(start + of_a.float() * a + of_b.float() * b)
            return loss.detach()

        return step


class HorovodFaulty(Horovod):
    """Horovod whose last rank fails at step 2."""

    fault: Literal["raises", "killed", "hangs"] = "raises"
    """How the rank fails."""

    def setup(self, job: Job) -> TrainStep:
        train = super().setup(job)

        def step(batch: Batch) -> Any:
            if job.rank == job.layout.processes - 1 and batch.step == 2:
                if self.fault == "raises":
                    raise ValueError("the planted mistake")
                if self.fault == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(3600)
            return train(batch)

        return step
