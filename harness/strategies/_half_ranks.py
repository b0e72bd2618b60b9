from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from harness.cell.training import Batch, TrainStep
from harness.seam import Job
from harness.seam.job import backward_of, loss_scaler, own_precision, update_of
from harness.strategies._half import Order
from harness.strategies.amp import Amp

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer


class HalfRanks(Amp):
    """AMP O2 in one process. Adds half-precision gradients in the ranks' order, and so rounds like
    them."""

    ranks: int = Field(ge=1)
    order: Order = "ranks"
    """What is added first. `ranks`: each rank adds its micro-batches. `micro_batches`: each
    micro-batch is added over ranks, as in ZeRO's stages 2 and 3. `fp32`: all are added in fp32."""

    def step_by_masters(
        self,
        job: Job,
        model: DistributedDataParallel,
        optimizer: Optimizer,
        masters: Sequence[Tensor],
    ) -> TrainStep:
        import torch

        parts, plain = job.cell.micro_batches // self.ranks, own_precision(job)
        times = 1 if self.order == "ranks" else parts
        cell = plain.cell.model_copy(update={"micro_batches": parts // times})
        masters_job = dataclasses.replace(plain, cell=cell)
        scaler = loss_scaler(job)
        backward, update = (
            backward_of(masters_job, model, scaler),
            update_of(masters_job, optimizer, scaler),
        )
        parameters, in_fp32 = list(model.parameters()), self.order == "fp32"

        def step(batch: Batch) -> Tensor:
            losses, sums = [], list[list["Tensor | None"]]()
            for number in range(times):
                gradients = []
                for share in batch.split(self.ranks):
                    losses.append(backward(share.part(number, times)))
                    found = [parameter.grad for parameter in parameters]
                    gradients.append([g.float() if in_fp32 and g is not None else g for g in found])
                    model.zero_grad()
                divisor = self.ranks * times
                sums.append([_sum(copies, divisor) for copies in zip(*gradients, strict=True)])
            for master, added in zip(masters, zip(*sums, strict=True), strict=True):
                total = _sum(added)
                master.grad = None if total is None else total.float()
            update()
            return torch.stack(losses).mean()

        return step


def _sum(tensors: Sequence[Tensor | None], divisor: int = 1) -> Tensor | None:
    total: Tensor | None = None
    for tensor in tensors:
        if tensor is not None:
            quotient = tensor / divisor
            total = quotient if total is None else total + quotient
    return total
