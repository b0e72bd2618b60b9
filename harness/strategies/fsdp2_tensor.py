from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, cast

from pydantic import Field

from harness.cell.errors import Refused
from harness.cell.training import Layout, States, TrainStep
from harness.seam import Capabilities, Cell, Job, ModelFacts, Strategy
from harness.seam.job import standard_step
from harness.strategies.fsdp2 import shard_by_block, without_sync
from harness.strategies.tensor import TensorParallel
from harness.workloads import Workload

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from harness.seam.pipelining import Stage

Restore: TypeAlias = "dict[str, Callable[[Tensor], Tensor]]"
"""Functions that restore whole weights, by name."""


class Fsdp2Tensor(Strategy):
    """FSDP2 x tensor parallelism (2D): neighbouring ranks split weights, the others shard them.

    Weights must be split before they are sharded, and optimizers made after both. Ranks that share
    a weight need the same samples: with different ones, training runs and diverges.
    """

    capabilities = Capabilities(precisions=("fp32", "bf16"))

    tensor: int = Field(default=2, ge=1)
    """Ranks over which each weight is split."""
    replicas: int = Field(default=1, ge=1)
    """Replicas that each shard the model separately (HSDP)."""
    sequence_parallel: bool = False
    """Also split the sequence over the tensor-parallel ranks in token-wise operations."""

    def layout(self, devices: int) -> Layout:
        if devices % (self.tensor * self.replicas):
            by = f"tensor {self.tensor} x replicas {self.replicas}"
            raise Refused(f"{devices} devices are not divisible by {by}")
        return Layout(data=devices // self.tensor, tensor=self.tensor)

    @property
    def split(self) -> TensorParallel:
        """Strategy of the tensor-parallel ranks alone."""
        return TensorParallel(sequence_parallel=self.sequence_parallel)

    def check(self, cell: Cell, workload: Workload) -> None:
        self.split.check(cell.model_copy(update={"devices": self.tensor}), workload)

    def setup(self, job: Job) -> TrainStep:
        from torch.distributed.device_mesh import init_device_mesh

        from harness.seam.pipelining import Stage

        shape = (self.replicas, job.layout.data // self.replicas, self.tensor)
        names = ("replicate", "shard", "tensor")
        mesh = init_device_mesh(job.device.type, shape, mesh_dim_names=names)
        stage = Stage(job)
        shards = mesh["replicate", "shard"] if self.replicas > 1 else mesh["shard"]
        # A split sequence needs explicit positions, which the stage knows.
        root = stage if self.sequence_parallel else stage.model
        restore = split_and_shard(root, stage, mesh["tensor"], shards, self.sequence_parallel)
        optimizer = job.optimizer(root.parameters())
        job.register(stage.model, optimizer).restore = restore
        no_sync = functools.partial(without_sync, cast("FSDPModule", root))
        return standard_step(job, root, optimizer, no_sync=no_sync)

    @property
    def shards_parameters(self) -> bool:
        return True

    @property
    def accumulates_whole_gradients(self) -> bool:
        return True

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States | None:
        """Returns the states of a tensor-parallel rank (arXiv 1909.08053), sharded by ZeRO-3."""
        states = self.split.states(cell, layout, facts)
        if states is None:
            return None
        shards = layout.data // self.replicas
        whole = cell.micro_batches > 1
        return dataclasses.replace(
            states,
            parameters=states.parameters / shards,
            optimizer=states.optimizer / shards,
            transient=states.transient / (1 if whole else shards),
        )

    def activation_bytes(self, cell: Cell, layout: Layout, workload: Workload) -> float | None:
        return self.split.activation_bytes(cell, layout, workload)


def split_and_shard(
    root: nn.Module,
    stage: Stage,
    tensor: DeviceMesh,
    shards: DeviceMesh,
    sequence_parallel: bool = False,
) -> Restore:
    """Splits weights over mesh `tensor`, then shards blocks and the rest over mesh `shards`, in
    place. `root`: what is called, the stage or its model. Returns functions that restore whole
    weights."""
    from harness.seam.pipelining import split_tensors

    restore = split_tensors(stage, tensor, sequence_parallel) if tensor.size() > 1 else {}
    shard_by_block(root, stage.blocks, shards)
    return restore
