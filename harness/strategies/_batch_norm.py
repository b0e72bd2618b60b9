"""BatchNorm over the samples of all ranks, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


def all_reduced_batch_norm(model: nn.Module) -> nn.Module:
    """Lets every BatchNorm2d of the model take its statistics over all ranks, which must hold
    equally many samples."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed._functional_collectives import all_reduce

    assert dist.group.WORLD is not None
    group: dist.ProcessGroup = dist.group.WORLD

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
