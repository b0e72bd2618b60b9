"""fairscale as it is easily used: gradients cleared through the optimizer."""

from typing import Any, Literal

from harness.strategies.fairscale_oss import FairscaleOss


class FairscaleTraps(FairscaleOss):
    """OSS + ShardedDataParallel whose gradients are cleared in another way."""

    through: Literal["model", "optimizer", "optimizer_to_zero", "shard", "shard_to_zero"] = "model"
    """What clears them."""

    def clear(self, model: Any, optimizer: Any) -> None:
        from torch.optim import Optimizer

        if self.through == "model":
            super().clear(model, optimizer)
        else:
            which = optimizer.optim if self.through.startswith("shard") else optimizer
            Optimizer.zero_grad(which, set_to_none=not self.through.endswith("zero"))
