"""A trial's loss at each step, from those of its ranks."""

from __future__ import annotations

from collections.abc import Sequence


def mean_losses(ranks: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Mean loss of each step over the ranks that have one (equal shares of the batch).

    `ranks`: the losses of each rank, by step.
    """
    losses: list[float | None] = []
    for step in zip(*ranks, strict=True):
        have = [loss for loss in step if loss is not None]
        losses.append(sum(have) / len(have) if have else None)
    return losses
