from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.cell.cell import Cell

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR
    from torch.optim.optimizer import ParamsT

    from harness.workloads.dropout import Masks
    from harness.workloads.fused_loss import FusedHead

Clip = Callable[[float], "Tensor | float | None"]
"""Function that clips gradients to a global 2-norm and returns the norm before clipping."""
WARMUP_SHARE = 0.25
"""Share of the parity segment in which the learning rate rises."""
LAST_FACTOR = 0.1
"""Learning-rate factor from the end of the parity segment on."""


def _new_masks() -> Masks:
    from harness.workloads.dropout import Masks

    return Masks()


@dataclass
class RecipeState:
    """Recipe state of one rank, shared by copies of its `Job`."""

    gradient_norm: Tensor | float | None = None
    """Global gradient norm of the latest step, before clipping; None if gradients are not
    clipped."""
    clip: Clip | None = None
    """The library's own clipping; None if it has none."""
    schedulers: list[LambdaLR] = field(default_factory=list)
    head: FusedHead | None = None
    """Head that computes the loss, in cells with such a loss."""
    masks: Masks = field(default_factory=_new_masks)
    """Dropout masks of this rank's model."""


def learning_rate_factor(cell: Cell, step: int) -> float:
    """Returns the learning-rate factor at a step: a linear warm-up, then 1 or a cosine, down to
    LAST_FACTOR at the end of the parity segment. It does not depend on the number of steps, since a
    reference run for later steps is longer."""
    if cell.schedule == "constant":
        return 1.0
    warmup = max(1, round(WARMUP_SHARE * cell.parity_steps))
    if step < warmup:
        return (step + 1) / warmup
    if cell.schedule == "warmup":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, cell.parity_steps - warmup))
    return LAST_FACTOR + (1 - LAST_FACTOR) * 0.5 * (1 + math.cos(math.pi * done))


def decayed(cell: Cell) -> float:
    """Returns the approximate fraction of a weight lost to its decay in the parity segment."""
    factors = (learning_rate_factor(cell, step) for step in range(cell.parity_steps))
    return cell.learning_rate * cell.weight_decay * sum(factors)


def make_scheduler(cell: Cell, optimizer: Optimizer) -> LambdaLR:
    """Returns torch's LambdaLR, whose `steps` can be set when training is rewound."""
    from torch.optim.lr_scheduler import LambdaLR

    class RewindableLambdaLR(LambdaLR):
        @property
        def steps(self) -> int:
            return self.last_epoch

        @steps.setter
        def steps(self, value: int) -> None:
            self.last_epoch = value
            for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
                group["lr"] = rate

    return RewindableLambdaLR(optimizer, lambda step: learning_rate_factor(cell, step))


def parameter_groups(
    cell: Cell, parameters: Iterable[Tensor], matrices: Mapping[Tensor, bool] | None = None
) -> ParamsT:
    """Returns the optimizer's parameters, in two groups if only matrices decay. `matrices`: whether
    each parameter is a matrix, for libraries that flatten parameters."""
    everything = list(parameters)
    if cell.decay == "all":
        return everything
    decaying: list[Tensor] = []
    others: list[Tensor] = []
    for parameter in everything:
        decays = parameter.ndim >= 2 if matrices is None else matrices[parameter]
        (decaying if decays else others).append(parameter)
    groups = {"params": decaying}, {"params": others, "weight_decay": 0.0}
    return [group for group in groups if group["params"]]


def whole(norm: Tensor) -> Tensor:
    """Returns a norm over all ranks of its mesh, if it is a DTensor."""
    from torch.distributed.tensor import DTensor

    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clip_gradients(
    parameters: Iterable[Tensor],
    max_norm: float,
    group: ProcessGroup | None = None,
    copies: Collection[Tensor] = (),
) -> Tensor:
    """Clips gradients to a global 2-norm; returns the norm before clipping. torch's
    `clip_grad_norm_` fails on DTensors of several meshes (2.13). `group`: ranks with other
    parameters, such as pipeline stages. `copies`: parameters that another rank of the group
    counts."""
    import torch
    import torch.distributed as dist
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    kinds: dict[object, list[Tensor]] = {}
    everything = list(parameters)
    for parameter in everything:
        if parameter.grad is not None:
            mesh = getattr(_whole_gradient(parameter), "device_mesh", None)
            kinds.setdefault(mesh, []).append(parameter)
    ignored = {id(parameter) for parameter in copies}
    norms = [torch.zeros((), device=everything[0].device)]
    for same in kinds.values():
        norm = get_total_norm([_whole_gradient(p) for p in same if id(p) not in ignored])
        norms.append(whole(norm))
    total: Tensor = torch.stack(norms).norm()
    if group is not None:
        squared = total**2
        dist.all_reduce(squared, group=group)
        total = squared.sqrt()
    for same in kinds.values():
        clip_grads_with_norm_(same, max_norm, total)
    return total


def _whole_gradient(parameter: Tensor) -> Tensor:
    from torch.distributed.tensor.parallel._data_parallel_utils import _unflatten_tensor

    assert parameter.grad is not None
    spec = getattr(parameter, "_st_info", None)
    return parameter.grad if spec is None else _unflatten_tensor(parameter.grad, spec)
