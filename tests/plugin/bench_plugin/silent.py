"""Real libraries whose ranks stop exchanging gradients at some step."""

from __future__ import annotations

from typing import Any

from harness.seam import Batch, Job, TrainStep
from harness.strategies.ddp import Ddp
from harness.strategies.fsdp2 import Fsdp2


class SilentDdp(Ddp):
    """DDP that accumulates gradients for ever, as with a `no_sync` that is never left."""

    from_step: int = 60
    """First step without an exchange."""

    def setup(self, job: Job) -> TrainStep:
        step = super().setup(job)
        assert job.train_state is not None
        model: Any = job.train_state.model

        def silent(batch: Batch) -> Any:
            if batch.step < self.from_step:
                return step(batch)
            with model.no_sync():
                return step(batch)

        return silent


class SilentFsdp2(Fsdp2):
    """FSDP2 whose ranks keep only their own gradient of their shard."""

    from_step: int = 60
    """First step without an exchange."""

    def setup(self, job: Job) -> TrainStep:
        import torch.distributed as dist

        step = super().setup(job)
        exchange = dist.reduce_scatter_single

        def kept(output: Any, input: Any, **more: Any) -> Any:
            work = exchange(output=output, input=input, **more)
            output.copy_(input.chunk(dist.get_world_size())[job.rank] * dist.get_world_size())
            return work

        def silent(batch: Batch) -> Any:
            if batch.step == self.from_step:
                dist.reduce_scatter_single = kept
            return step(batch)

        return silent
