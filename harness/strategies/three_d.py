"""3D parallelism."""

from __future__ import annotations

import functools
from typing import Literal

from pydantic import Field

from harness.spec.errors import Refused
from harness.strategies._three_d_export import three_d_export
from harness.strategy import (
    Capabilities,
    Cell,
    CostModel,
    Export,
    Job,
    Layout,
    ModelFacts,
    States,
    Strategy,
    TrainStep,
)
from harness.strategy.formulas import a_stage_each, pipeline_states
from harness.strategy.schedules import check_micro_batches
from harness.workloads import Workload


class ThreeD(Strategy):
    """3D parallelism: data x pipeline x tensor on one mesh, tensor innermost."""

    capabilities = Capabilities(precisions=("fp32", "bf16"))

    tensor: int = Field(default=2, ge=1)
    """Ranks over which each weight is split."""
    pipeline: int = Field(default=2, ge=1)
    """Stages into which the layers are split."""
    data_axis: Literal["fsdp2", "all_reduce", "zero1", "ddp"] = "fsdp2"
    """fully_shard; gradient all-reduce without or with ZeRO-1 (ZeroRedundancyOptimizer); or DDP."""
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    """Order of forwards and backwards."""

    def layout(self, devices: int) -> Layout:
        if devices % (self.tensor * self.pipeline):
            by = f"tensor {self.tensor} x pipeline {self.pipeline}"
            raise Refused(f"{devices} devices do not divide by {by}")
        data = devices // (self.tensor * self.pipeline)
        return Layout(data=data, pipeline=self.pipeline, tensor=self.tensor)

    def check(self, cell: Cell, workload: Workload) -> None:
        workload.check_split(self.layout(cell.devices))
        check_micro_batches(self.schedule, self.pipeline, cell.micro_batches)
        if workload.split and self.tensor > 1:
            workload.split.check_tensor(sequence_parallel=False)

    def export(self, cell: Cell, to: str) -> Export | None:
        return three_d_export(cell, to, self.layout(cell.devices), self.data_axis, self.schedule)

    @property
    def costs(self) -> ThreeDCosts:
        return ThreeDCosts(self)

    def setup(self, job: Job) -> TrainStep:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from harness.strategies._three_d import stage_optimizer, wrap_stage
        from harness.strategy.pipelining import Pipe, train_step
        from harness.strategy.stage import Stage, split_tensors

        shape = (job.layout.data, job.layout.pipeline, job.layout.tensor)
        mesh = init_device_mesh(
            job.device.type, shape, mesh_dim_names=("data", "pipeline", "tensor")
        )
        data = mesh.get_group("data")
        stage = Stage(job, mesh.get_local_rank("pipeline"), self.pipeline)
        restore = split_tensors(stage, mesh["tensor"]) if self.tensor > 1 else {}
        for module in (*stage.blocks, stage) if self.data_axis == "fsdp2" else ():
            fully_shard(module, mesh=mesh["data"])
        wrap = functools.partial(wrap_stage, axis=self.data_axis, group=data)
        pipe = Pipe(job, self.schedule, [stage], mesh.get_group("pipeline"), wrap)
        optimizer = stage_optimizer(
            job, pipe.parameters, data if self.data_axis == "zero1" else None
        )
        averaged = data if self.data_axis in ("all_reduce", "zero1") else None
        return train_step(job, pipe, optimizer, averaged, restore=restore)


class ThreeDCosts(CostModel[ThreeD]):
    @property
    def zero_stage(self) -> int:
        return {"fsdp2": 3, "zero1": 1}.get(self.strategy.data_axis, 0)

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States | None:
        """Returns states of the rank's part, sharded on the data axis (see `axis_states`), and
        receive buffers."""
        from harness.strategies._three_d_formulas import axis_states

        keeps = functools.partial(axis_states, axis=self.strategy.data_axis, ranks=layout.data)
        return pipeline_states(cell, layout, facts, a_stage_each(layout), keeps)

    def activation_bytes(self, cell: Cell, layout: Layout, workload: Workload) -> float | None:
        """Returns bytes of micro-batches in flight, with FSDP2's gathers, see
        `held_beside_gradients`."""
        from harness.strategy.pipeline_memory import Engine, held_beside_gradients

        shards = layout.data if self.strategy.data_axis == "fsdp2" else 0
        engine = Engine(self.strategy.schedule, layout.tensor, shards)
        return held_beside_gradients(cell, layout, workload, a_stage_each(layout), engine)
