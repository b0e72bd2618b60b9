from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, cast

from pydantic import Field

from harness.cell.errors import Refused
from harness.cell.training import Layout, TrainStep
from harness.seam import Cell, Export, Job, ModelFacts
from harness.seam.job import standard_step
from harness.strategies import _distributed as mesh
from harness.strategies._mesh_traffic import (
    scatters_of,
    sharded_traffic,
    tensor_traffic,
)
from harness.strategies.fsdp2 import without_sync
from harness.workloads import Workload, make_workload

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class DistributedConfigParallel(mesh.MeshStrategy):
    """transformers' native FSDP2, tensor and expert parallelism (`DistributedConfig`).

    Expert parallelism drops no token; an expert's gradient is the mean over all samples.
    """

    expert: int = Field(default=1, ge=1)
    """Ranks that share each layer's experts; a multiple of `tensor`."""

    def sizes(self, devices: int) -> mesh.MeshSizes:
        return dataclasses.replace(super().sizes(devices), expert=self.expert)

    def check(self, cell: Cell, workload: Workload) -> None:
        mesh.check_version()
        if cell.checkpoint == "async":
            raise Refused(
                'torch cannot copy the files that transformers maps into memory ("copy_() on an'
                ' invalid python storage"); use checkpoint sharded'
            )
        super().check(cell, workload)

    def export(self, cell: Cell, to: str) -> Export | None:
        """Returns a script, except with tensor parallelism: its ranks all train other samples."""
        if to not in ("torchrun", "slurm") or self.tensor > 1:
            return None
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if cell.device == "cpu" else {}
        shards = self.sizes(cell.devices).shards
        return Export("distributed_config.py.j2", {"shards": shards}, variables=hidden)

    def setup(self, job: Job) -> TrainStep:
        sizes = self.sizes(job.cell.devices)
        model = mesh.load(job, sizes)
        optimizer = job.optimizer(model.parameters())
        job.register(model, optimizer).states = lambda: mesh.retained_parts(model, optimizer)
        no_sync = None
        if sizes.shards * sizes.replicas > 1:
            # As transformers' Trainer does (version 5.23, `_defer_fsdp_gradient_reduction`).
            no_sync = functools.partial(
                without_sync, cast("FSDPModule", model), within_replicas=sizes.replicas > 1
            )
        return standard_step(job, model, optimizer, no_sync=no_sync)

    @property
    def accumulates_whole_gradients(self) -> bool:
        return self.replicas == 1

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        workload, sizes = make_workload(cell.workload), self.sizes(cell.devices)
        if sizes.tensor == 1:
            freed = mesh.plans_of(workload).freed
            scatters = scatters_of(cell.micro_batches, sizes.replicas)
            return sharded_traffic(cell, layout, workload, sizes, facts, freed, scatters)
        if layout.data > 1:
            return None
        return tensor_traffic(cell, layout, workload, sizes, facts)
