"""DDP with synchronized batch norm: statistics are taken over the samples of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.spec.cell import Cell
from harness.spec.errors import Refused
from harness.spec.training import TrainStep
from harness.strategy.base import Strategy
from harness.strategy.job import Job
from harness.strategy.step import standard_step

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.workloads import Workload


class SyncBatchNorm(Strategy):
    """DDP with SyncBatchNorm: BatchNorm sees the whole global batch, so the training is that of a
    single process.

    torch's SyncBatchNorm takes GPU modules only. On CPU the same statistics are exchanged by a
    differentiable all-reduce.
    """

    synchronizes_batch_norm = True

    def check(self, cell: Cell, workload: Workload) -> None:
        if not workload.batch_norm:
            raise Refused(
                f"{workload.name} has no batch norm to synchronize; use a resnet workload"
            )
        if cell.micro_batches > 1:
            raise Refused(
                "batch norm is synchronized over ranks, not over micro-batches, which run one after"
                " the other; use 1"
            )

    def stand_in(self, cell: Cell) -> str | None:
        return (
            "BatchNorm2d with all-reduced statistics instead of torch's SyncBatchNorm"
            if cell.device == "cpu"
            else None
        )

    def setup(self, job: Job) -> TrainStep:
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        on_gpu = job.device.type == "cuda"
        gpu_norm: Any = nn.SyncBatchNorm
        model = gpu_norm.convert_sync_batchnorm(job.model()) if on_gpu else convert(job.model())
        replica = DistributedDataParallel(model, device_ids=[job.device] if on_gpu else None)
        optimizer = job.optimizer(replica.parameters())
        job.register(replica, optimizer)
        return standard_step(job, replica, optimizer)


def convert(model: nn.Module) -> nn.Module:
    """Lets every BatchNorm2d of the model take its statistics over all ranks, which must hold
    equally many samples."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed._functional_collectives import all_reduce

    group: Any = dist.group.WORLD

    class AllReducedBatchNorm(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            if not self.training:
                return super().forward(input)
            x = input.float()
            # The variance has an exchange of its own: as E[x^2] - E[x]^2 it would lose the digits
            # that both share.
            mean: Tensor = all_reduce(x.mean((0, 2, 3)), "sum", group) / group.size()
            centred = x - mean[:, None, None]
            variance: Tensor = (
                all_reduce(centred.square().mean((0, 2, 3)), "sum", group) / group.size()
            )
            samples = group.size() * x.numel() // x.shape[1]
            if (
                self.running_mean is not None
                and self.running_var is not None
                and self.num_batches_tracked is not None
            ):
                self.num_batches_tracked += 1
                momentum = (
                    self.momentum
                    if self.momentum is not None
                    else 1 / int(self.num_batches_tracked)
                )
                self.running_mean.lerp_(mean.detach(), momentum)
                self.running_var.lerp_(variance.detach() * samples / (samples - 1), momentum)
            scale = self.weight * (variance + self.eps).rsqrt()
            return (centred * scale[:, None, None] + self.bias[:, None, None]).to(input.dtype)

    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = AllReducedBatchNorm
    return model
