"""fairscale with an easily made mistake: clearing gradients through the optimizer."""

from functools import partial
from typing import Any, Literal

from harness.seam import Job, TrainStep, standard_step
from harness.strategies import fairscale_oss
from harness.strategies.fairscale_oss import FairscaleOss


class FairscaleTraps(FairscaleOss):
    """OSS and ShardedDataParallel with different ways to clear gradients."""

    through: Literal["model", "optimizer", "optimizer_to_zero", "shard", "shard_to_zero"] = "model"
    """Object that clears gradients; `_to_zero` sets them to zero instead of None."""

    def step(self, job: Job, model: Any, optimizer: Any, **options: Any) -> TrainStep:
        from torch.optim import Optimizer

        which = optimizer.optim if self.through.startswith("shard") else optimizer
        to_none = not self.through.endswith("zero")
        options["clear"] = partial(Optimizer.zero_grad, which, set_to_none=to_none)
        return standard_step(job, model, optimizer, **options)

    def setup(self, job: Job) -> TrainStep:
        if self.through != "model":
            vars(fairscale_oss)["standard_step"] = self.step
        return super().setup(job)
