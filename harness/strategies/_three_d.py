"""The data axis of 3D parallelism."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform, _reconstruct_dtensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from harness.strategy import Job
from harness.strategy.stage import Stage


def wrap_stage(stage: Stage, axis: str, group: dist.ProcessGroup) -> nn.Module:
    """Removes DTensors between forwards, which DDP and ZeroRedundancyOptimizer reject; wraps the
    stage in DDP on that axis.

    A schedule's first forward, for shapes, has no backward. DDP fails at it without
    find_unused_parameters.
    """
    if axis == "fsdp2":
        return stage
    _pre_dp_module_transform(stage)
    stage.register_forward_pre_hook(_with_gradients, prepend=True)
    if axis != "ddp":
        return stage
    return DistributedDataParallel(stage, process_group=group, find_unused_parameters=True)


def _with_gradients(stage: nn.Module, inputs: object) -> None:
    """Rebuilds the stage's DTensors from its local parameters, with gradients enabled.

    Before torch 2.12 the first forward runs without gradients; DTensors built by torch's own hook
    would never pass any on.
    """
    with torch.enable_grad():
        _reconstruct_dtensor(stage, inputs)


def stage_optimizer(
    job: Job, parameters: Sequence[nn.Parameter], shards: dist.ProcessGroup | None
) -> Optimizer:
    """Returns the cell's optimizer, its state sharded over this group if given."""
    if shards is None:
        return job.optimizer(parameters)
    kind, kwargs = job.optimizer_class()
    return ZeroRedundancyOptimizer(parameters, kind, shards, **kwargs)
