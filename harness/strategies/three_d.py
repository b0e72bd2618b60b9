"""3D parallelism: data x pipeline x tensor on one mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from harness.cell import Cell
from harness.errors import Refused
from harness.strategy import Job, Layout, Strategy, TrainStep

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from harness.workloads import Workload
    from harness.workloads.stage import Stage


class ThreeD(Strategy):
    """3D parallelism: data x pipeline x tensor on one mesh, tensor innermost."""

    precisions = ("fp32", "bf16")

    tensor: int = Field(default=2, ge=1)
    """Ranks over which each weight is split."""
    pipeline: int = Field(default=2, ge=1)
    """Stages into which the layers are split."""
    data_axis: Literal["fsdp2", "all_reduce", "zero1", "ddp"] = "fsdp2"
    """How data-parallel ranks share: parameters sharded (fully_shard), gradients all-reduced after the schedule by hand,
    the same with optimizer states sharded (ZeroRedundancyOptimizer), or DistributedDataParallel."""
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    """Order of forwards and backwards."""

    def layout(self, devices: int) -> Layout:
        if devices % (self.tensor * self.pipeline):
            raise Refused(f"{devices} devices do not divide by tensor {self.tensor} x pipeline {self.pipeline}")
        return Layout(data=devices // (self.tensor * self.pipeline), pipeline=self.pipeline, tensor=self.tensor)

    def check(self, cell: Cell, workload: Workload) -> None:
        from harness.pipelining import check_micro_batches

        workload.check_split(self.layout(cell.devices))
        check_micro_batches(self.schedule, self.pipeline, cell.micro_batches)
        if workload.split and self.tensor > 1:
            workload.split.tensor_plan(sequence_parallel=False)

    def setup(self, job: Job) -> TrainStep:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from harness.pipelining import Pipe, average, train_step
        from harness.workloads.stage import Stage, split_tensors

        layout = job.layout
        mesh = init_device_mesh(
            job.device.type, (layout.data, layout.pipeline, layout.tensor), mesh_dim_names=("data", "pipeline", "tensor")
        )
        stage = Stage(job, mesh.get_local_rank("pipeline"), layout.pipeline)
        restore = split_tensors(stage, mesh["tensor"]) if self.tensor > 1 else {}
        if self.data_axis == "fsdp2":
            for module in (*stage.blocks, stage):
                fully_shard(module, mesh=mesh["data"])
        pipe = Pipe(job, self.schedule, [stage], mesh.get_group("pipeline"), lambda stage: self._wrap(stage, mesh.get_group("data")))
        optimizer = self._optimizer(job, pipe.parameters, mesh.get_group("data"))
        by_hand = self.data_axis in ("all_reduce", "zero1")
        reduce = (lambda: average(pipe.parameters, mesh.get_group("data"))) if by_hand else (lambda: None)
        return train_step(job, pipe, optimizer, reduce, restore=restore)

    def _wrap(self, stage: Stage, group: Any) -> nn.Module:
        """The stage with plain tensors for DTensors outside of its forward, which DDP and ZeroRedundancyOptimizer need."""
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
        from torch.nn.parallel import DistributedDataParallel

        if self.data_axis == "fsdp2":
            return stage
        _pre_dp_module_transform(stage)
        return DistributedDataParallel(stage, process_group=group, find_unused_parameters=True) if self.data_axis == "ddp" else stage

    def _optimizer(self, job: Job, parameters: Any, group: Any) -> Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        if self.data_axis != "zero1":
            return job.optimizer(parameters)
        optimizer, kwargs = job.optimizer_class()
        return ZeroRedundancyOptimizer(parameters, optimizer, process_group=group, **kwargs)
