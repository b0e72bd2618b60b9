"""Collectives over all ranks, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


def broadcast(parameters: Iterable[nn.Parameter]) -> None:
    """Sends rank 0's values to all ranks."""
    import torch.distributed as dist

    for parameter in parameters:
        dist.broadcast(parameter.detach(), 0)


def average(tensors: Iterable[Tensor]) -> None:
    """Averages the tensors over all ranks, in place."""
    import torch.distributed as dist

    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Averages existing gradients over all ranks, in place."""
    average([p.grad for p in parameters if p.grad is not None])
