from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.cell.errors import Refused
from harness.cell.training import TrainStep
from harness.seam import Capabilities, Cell, Job, Strategy
from harness.seam.job import standard_step
from harness.strategies.ddp import ddp_buckets, wrap_in_ddp
from harness.workloads import Workload

if TYPE_CHECKING:
    from torch import Tensor, nn


class SyncBatchNorm(Strategy):
    """DDP with SyncBatchNorm: BatchNorm sees the whole global batch, as in a single process.

    torch's SyncBatchNorm needs GPUs. On CPUs, a differentiable all-reduce exchanges the same
    statistics.
    """

    capabilities = Capabilities(synchronizes_batch_norm=True, skips_parameters=True)

    def check(self, cell: Cell, workload: Workload) -> None:
        if not workload.batch_norm:
            raise Refused(
                f"{workload.name} has no batch norm to synchronize; use a resnet workload"
            )
        if cell.micro_batches > 1:
            raise Refused(
                "batch norm is synchronized over ranks, not over micro-batches, which run one after"
                " the other; use micro_batches 1"
            )

    def stand_in(self, cell: Cell) -> str | None:
        return (
            "BatchNorm2d with all-reduced statistics instead of torch's SyncBatchNorm"
            if cell.device == "cpu"
            else None
        )

    def setup(self, job: Job) -> TrainStep:
        from torch import nn

        on_gpu = job.device.type == "cuda"
        convert = nn.SyncBatchNorm.convert_sync_batchnorm if on_gpu else all_reduced_batch_norm
        replica = wrap_in_ddp(job, convert(job.model()))
        optimizer = job.optimizer(replica.parameters())
        job.register(replica, optimizer).library = lambda: ddp_buckets(replica)
        return standard_step(job, replica, optimizer)


def all_reduced_batch_norm(model: nn.Module) -> nn.Module:
    """Makes every BatchNorm2d use statistics over all ranks (equal numbers of samples)."""
    import torch
    import torch.distributed as dist
    from torch import nn

    ranks = dist.get_world_size()

    def total(part: Tensor) -> Tensor:
        summed = part.clone()
        dist.all_reduce(summed)
        return summed

    # torch's functional all-reduce is differentiable only from 2.11.
    class Total(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, part: Tensor) -> Tensor:
            return total(part)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return total(gradients[0])

    def mean_over_ranks(part: Tensor) -> Tensor:
        summed: Tensor = Total.apply(part)  # type: ignore[no-untyped-call]
        return summed / ranks

    class AllReducedBatchNorm(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            if not self.training:
                return super().forward(input)
            x = input.float()
            # The variance is exchanged separately, because E[x^2] - E[x]^2 would cancel significant
            # digits.
            mean = mean_over_ranks(x.mean((0, 2, 3)))
            centred = x - mean[:, None, None]
            variance = mean_over_ranks(centred.square().mean((0, 2, 3)))
            samples = ranks * x.numel() // x.shape[1]
            count, running = self.num_batches_tracked, (self.running_mean, self.running_var)
            if count is not None and running[0] is not None and running[1] is not None:
                count += 1
                momentum = self.momentum if self.momentum is not None else 1 / int(count)
                running[0].lerp_(mean.detach(), momentum)
                running[1].lerp_(variance.detach() * samples / (samples - 1), momentum)
            scale = self.weight * (variance + self.eps).rsqrt()
            return (centred * scale[:, None, None] + self.bias[:, None, None]).to(input.dtype)

    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = AllReducedBatchNorm
    return model
