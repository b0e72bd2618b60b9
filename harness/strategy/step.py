"""The common training step: forward, backward, optimizer, over micro-batches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.spec.training import Batch, TrainStep
from harness.strategy.job import Job

if TYPE_CHECKING:
    from torch import Tensor
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import Optimizer

    from harness.workloads.workload import HasLogits


LOSS_SCALE = 4096.0


def standard_step(
    job: Job,
    model: Callable[[Tensor], Tensor | HasLogits],
    optimizer: Optimizer,
    *,
    no_sync: Callable[[], contextlib.AbstractContextManager[object]] | None = None,
    before_update: Callable[[], None] | None = None,
    around_update: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    scaler: GradScaler | None = None,
    clear: Callable[[], object] | None = None,
) -> TrainStep:
    """Returns one optimizer step: forward and backward of every micro-batch, then the update.

    Losses are divided by the number of micro-batches. fp16 uses dynamic loss scaling
    (torch.amp.GradScaler). `no_sync` wraps all micro-batches but the last. `before_update` runs
    after the last backward; `around_update` wraps the optimizer's step. `scaler` replaces the
    default, `clear` the optimizer's `zero_grad`.
    """
    import torch

    scaler = scaler or loss_scaler(job)
    clear = clear or optimizer.zero_grad
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
        with around_update():
            scaler.step(optimizer)
        scaler.update()
        clear()
        return total

    return step


def loss_scaler(job: Job) -> GradScaler:
    """Returns dynamic loss scaling in fp16 cells, disabled otherwise.

    It starts at 4096: torch's 65536 may overflow at first, and skipped steps diverge from the
    reference.
    """
    from torch.amp.grad_scaler import GradScaler

    return GradScaler(job.device.type, init_scale=LOSS_SCALE, enabled=job.cell.precision == "fp16")


def sharded_loss_scaler(job: Job) -> GradScaler:
    """Returns a loss scaler that makes all ranks skip the same steps, though each sees only its
    gradient shard."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    fp16 = job.cell.precision == "fp16"
    return ShardedGradScaler(job.device.type, init_scale=LOSS_SCALE, enabled=fp16)


def own_precision(job: Job) -> Job:
    """Returns the job without autocast and loss scaling, for strategies that handle precision
    themselves."""
    return dataclasses.replace(job, cell=job.cell.model_copy(update={"precision": "fp32"}))
