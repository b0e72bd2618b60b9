from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


def mean_losses(ranks: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Averages each step's losses over ranks that have one."""
    losses: list[float | None] = []
    for step in zip(*ranks, strict=True):
        have = [loss for loss in step if loss is not None]
        losses.append(sum(have) / len(have) if have else None)
    return losses


def first_known(ranks: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Returns each step's value from the first rank that has one."""
    return [next((v for v in step if v is not None), None) for step in zip(*ranks, strict=True)]


def loss_deviations(losses: Sequence[float | None], reference: Sequence[float]) -> list[float]:
    """Returns |loss - reference| / |reference| by step; infinite if a loss is missing or not
    finite."""
    gaps = []
    for step, expected in enumerate(reference):
        loss = losses[step] if step < len(losses) else None
        if loss is None or not math.isfinite(loss):
            gaps.append(math.inf)
        else:
            gaps.append(abs(loss - expected) / max(abs(expected), 1e-12))
    return gaps


@dataclass(frozen=True)
class Pass:
    """Consecutive steps up to a rewind or the end."""

    first: int
    losses: tuple[float | None, ...]

    def before(self, step: int) -> tuple[float | None, ...]:
        return self.losses[: max(0, step - self.first)]

    def since(self, step: int) -> tuple[float | None, ...]:
        return self.losses[max(0, step - self.first) :]


def passes(
    losses: Sequence[float | None], training_steps: Sequence[int | None]
) -> tuple[Pass, ...]:
    """Splits losses at rewinds. `training_steps`: step of each loss; None means its index."""
    steps = [number if step is None else step for number, step in enumerate(training_steps)]
    starts = [i for i, step in enumerate(steps) if i == 0 or step != steps[i - 1] + 1]
    return tuple(
        Pass(steps[begin], tuple(losses[begin:end]))
        for begin, end in itertools.pairwise((*starts, len(steps)))
    )
