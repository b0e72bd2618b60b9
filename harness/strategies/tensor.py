"""Tensor parallelism: each weight of attention and MLP split over the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.cell import Cell
from harness.errors import Refused
from harness.strategy import Job, Layout, Strategy, TrainStep
from harness.training import standard_step

if TYPE_CHECKING:
    from harness.workloads import Workload


class TensorParallel(Strategy):
    """Tensor parallelism: weights of attention and MLP split over the ranks by column, then by row."""

    precisions = ("fp32", "bf16")

    sequence_parallel: bool = False
    """Also split the sequence over the ranks, where each token is treated alone (norms, residuals)."""

    def layout(self, devices: int) -> Layout:
        return Layout(tensor=devices)

    def check(self, cell: Cell, workload: Workload) -> None:
        workload.check_split(self.layout(cell.devices))
        if workload.split:
            workload.split.tensor_plan(self.sequence_parallel)
        if self.sequence_parallel and cell.sequence_length % cell.devices:
            raise Refused(f"sequence_parallel needs a sequence length that divides by {cell.devices} devices, not {cell.sequence_length}")

    def setup(self, job: Job) -> TrainStep:
        from torch.distributed.device_mesh import init_device_mesh

        from harness.workloads.stage import Stage, split_tensors

        stage = Stage(job)
        restore = split_tensors(stage, init_device_mesh(job.device.type, (job.layout.tensor,)), self.sequence_parallel)
        optimizer = job.optimizer(stage.parameters())
        job.expose(stage.model, optimizer, restore=restore)
        return standard_step(job, stage, optimizer)
