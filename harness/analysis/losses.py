"""A trial's loss at each step, from those of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def mean_losses(answers: Sequence[dict[str, Any]]) -> list[float | None]:
    """Mean loss of each step over the ranks that have one (equal shares of the batch)."""
    losses: list[float | None] = []
    for steps in zip(*(a["steps"] for a in answers), strict=True):
        have = [s["loss"] for s in steps if s["loss"] is not None]
        losses.append(sum(have) / len(have) if have else None)
    return losses
