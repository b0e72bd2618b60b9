"""DDP that loses time in a known place, which a profile must find."""

from __future__ import annotations

import time
from typing import Any, Literal

from harness.seam import Job, Strategy, TrainStep, standard_step
from harness.workloads import DataSource


class Delayed(Strategy):
    """DDP that sleeps in each step, on all ranks or on one."""

    where: Literal["compute", "communication", "optimizer", "data", "nowhere"] = "nowhere"
    """Place of the sleep: the forward pass, the all-reduce's future, the update or the data
    loader."""
    only_rank: int = -1
    """Rank that sleeps; -1 for all."""
    seconds: float = 0.05

    def setup(self, job: Job) -> TrainStep:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(job.model())
        optimizer = job.optimizer(model.parameters())
        sleeps = self.only_rank in (-1, job.rank)

        def pause(*_: Any) -> None:
            if sleeps:
                time.sleep(self.seconds)

        # torch checks annotations, which would be strings here.
        def hook(state, bucket):  # type: ignore[no-untyped-def]
            """Acts like a slow link: the sum arrives late."""
            future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

            def late(done: Any) -> Any:
                if bucket.is_last():
                    pause()
                return done.value()[0] / job.cell.devices

            return future.then(late)

        if self.where == "compute":
            model.register_forward_pre_hook(pause)
        if self.where == "communication":
            model.register_comm_hook(None, hook)
        if self.where == "optimizer":
            optimizer.register_step_pre_hook(pause)
        if self.where == "data":
            batch = DataSource.batch
            later: Any = lambda *arguments: (pause(), batch(*arguments))[1]  # noqa: E731
            DataSource.batch = later  # type: ignore[method-assign]
        job.register(model, optimizer)
        return standard_step(job, model, optimizer)
