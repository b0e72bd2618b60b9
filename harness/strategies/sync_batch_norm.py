"""DDP with synchronized batch norm."""

from __future__ import annotations

from harness.strategies._batch_norm import all_reduced_batch_norm
from harness.strategies._ddp import wrap_in_ddp
from harness.strategy import (
    Capabilities,
    Cell,
    CostModel,
    Job,
    Layout,
    ModelFacts,
    Refused,
    Strategy,
    TrainStep,
    Workload,
    standard_step,
)


class SyncBatchNorm(Strategy):
    """DDP with SyncBatchNorm: BatchNorm sees the whole global batch, as in a single process.

    torch's SyncBatchNorm takes GPU modules only. On CPU a differentiable all-reduce exchanges the
    same statistics.
    """

    capabilities = Capabilities(synchronizes_batch_norm=True)

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

    @property
    def costs(self) -> SyncBatchNormCosts:
        return SyncBatchNormCosts(self)

    def setup(self, job: Job) -> TrainStep:
        from torch import nn

        on_gpu = job.device.type == "cuda"
        convert = nn.SyncBatchNorm.convert_sync_batchnorm if on_gpu else all_reduced_batch_norm
        replica = wrap_in_ddp(job, convert(job.model()))
        optimizer = job.optimizer(replica.parameters())
        job.register(replica, optimizer)
        return standard_step(job, replica, optimizer)


class SyncBatchNormCosts(CostModel[SyncBatchNorm]):
    def messages(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        """Counts DDP's messages and one per BatchNorm forward and backward.

        A convolution and its BatchNorm have three parameters, the last layer two.
        """
        return 1.0 + 2 * (len(facts.sizes) - 2) // 3
