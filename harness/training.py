"""The training step that most strategies share: forward, backward, optimizer, over micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.strategy import Batch, Job, TrainStep

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


def standard_step(
    job: Job,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    no_sync: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
    before_update: Callable[[], None] | None = None,
) -> TrainStep:
    """One optimizer step: every micro-batch forward and backward, then the update.

    The loss of each micro-batch is divided by their number, so that equal parts give the whole batch's mean gradient.
    fp16 gets dynamic loss scaling (torch.amp.GradScaler), other precisions none. `no_sync` is entered for all
    micro-batches but the last; `before_update` runs between the last backward and the optimizer.
    """
    import torch

    scaler = torch.amp.GradScaler(job.device.type, enabled=job.cell.precision == "fp16")  # type: ignore[attr-defined]
    parts = job.cell.micro_batches

    def step(batch: Batch) -> Tensor:
        total = torch.zeros((), device=job.device)
        for index, part in enumerate(batch.split(parts)):
            with no_sync() if no_sync and index < parts - 1 else contextlib.nullcontext():
                loss = job.loss(model, part) / parts
                scaler.scale(loss).backward()
            total += loss.detach()
        if before_update:
            before_update()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return total

    return step
