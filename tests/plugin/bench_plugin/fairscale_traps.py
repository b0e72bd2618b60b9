"""fairscale with an easily made mistake: clearing gradients through the optimizer."""

from typing import Any, Literal

from harness.strategies import fairscale_oss
from harness.strategies.fairscale_oss import FairscaleOss
from harness.strategy import Job, TrainStep


class FairscaleTraps(FairscaleOss):
    """OSS and ShardedDataParallel with different ways to clear gradients."""

    through: Literal["model", "optimizer", "optimizer_to_zero", "shard", "shard_to_zero"] = "model"
    """Object that clears gradients; `_to_zero` sets them to zero instead of None."""

    def clear(self, model: Any, optimizer: Any) -> None:
        from torch.optim import Optimizer

        which = optimizer.optim if self.through.startswith("shard") else optimizer
        Optimizer.zero_grad(which, set_to_none=not self.through.endswith("zero"))

    def setup(self, job: Job) -> TrainStep:
        if self.through != "model":
            fairscale_oss.clear = self.clear
        return super().setup(job)
