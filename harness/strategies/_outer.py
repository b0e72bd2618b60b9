"""DiLoCo's outer optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.spec.training import Tolerance

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import SGD


def outer_optimizer(model: nn.Module, learning_rate: float, momentum: float) -> SGD:
    """Returns SGD over all parameters, with Nesterov momentum unless it is 0."""
    import torch

    return torch.optim.SGD(
        model.parameters(), lr=learning_rate, momentum=momentum, nesterov=momentum > 0
    )


def outer_gain(learning_rate: float, momentum: float, periods: int) -> float:
    """Returns the outer optimizer's distance over these periods, relative to the ranks'.

    Assumes equal displacement in each period, and torch's Nesterov momentum.
    """
    buffer, way = 0.0, 0.0
    for _ in range(periods):
        buffer = momentum * buffer + 1
        way += learning_rate * (1 + momentum * buffer)
    return way / periods


def outer_tolerance(learning_rate: float, momentum: float, periods: int) -> Tolerance:
    return Tolerance(
        0.3,
        0.75 + abs(outer_gain(learning_rate, momentum, periods) - 1),
        "ranks step on their own gradients for a period, and the outer optimizer goes further or"
        " less far than they did",
    )
