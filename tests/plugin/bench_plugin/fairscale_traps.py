"""fairscale as it is easily used: gradients cleared through the optimizer."""

from typing import Any, Literal

from harness.strategies import fairscale_oss
from harness.strategies.fairscale_oss import FairscaleOss
from harness.strategy import Job, TrainStep


class FairscaleTraps(FairscaleOss):
    """OSS + ShardedDataParallel whose gradients are cleared in another way."""

    through: Literal["model", "optimizer", "optimizer_to_zero", "shard", "shard_to_zero"] = "model"
    """What clears them."""

    def clear(self, model: Any, optimizer: Any) -> None:
        from torch.optim import Optimizer

        which = optimizer.optim if self.through.startswith("shard") else optimizer
        Optimizer.zero_grad(which, set_to_none=not self.through.endswith("zero"))

    def setup(self, job: Job) -> TrainStep:
        if self.through != "model":
            fairscale_oss.clear = self.clear
        return super().setup(job)
