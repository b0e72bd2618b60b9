from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from harness.cell.errors import Refused
from harness.cell.schedules import Schedule
from harness.cell.training import Layout, Retained, States, TrainStep
from harness.seam import Capabilities, Cell, Export, Job, ModelFacts, Strategy
from harness.seam.checkpoints import OF_STAGES
from harness.seam.formulas import (
    check_micro_batches,
    dealt_out_states,
    model_states,
    pipeline_states,
    whole_model_states,
)
from harness.strategies.ddp import ddp_buckets
from harness.strategies.pipeline import pipeline_values
from harness.strategies.tensor import tensor_values
from harness.workloads import Workload, make_workload
from harness.workloads.counts import model_facts

if TYPE_CHECKING:
    from torch import distributed as dist
    from torch import nn
    from torch.optim import Optimizer

    from harness.seam.pipelining import Stage


class ThreeD(Strategy):
    """3D parallelism: data x pipeline x tensor on one mesh, tensor innermost.

    Tensor parallelism splits attention and MLP, not the embedding and head.
    """

    capabilities = Capabilities(precisions=("fp32", "bf16"), checkpoints=OF_STAGES, stages=True)

    tensor: int = Field(default=2, ge=1)
    """Ranks over which each weight is split."""
    pipeline: int = Field(default=2, ge=1)
    """Number of pipeline stages."""
    data_axis: Literal["fsdp2", "all_reduce", "zero1", "ddp"] = "fsdp2"
    """Data parallelism by fully_shard, by gradient all-reduce without or with ZeRO-1
    (ZeroRedundancyOptimizer), or by DDP."""
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    """Order of forwards and backwards."""

    def layout(self, devices: int) -> Layout:
        if devices % (self.tensor * self.pipeline):
            by = f"tensor {self.tensor} x pipeline {self.pipeline}"
            raise Refused(f"{devices} devices are not divisible by {by}")
        data = devices // (self.tensor * self.pipeline)
        return Layout(data=data, pipeline=self.pipeline, tensor=self.tensor)

    def check(self, cell: Cell, workload: Workload) -> None:
        workload.check_split(self.layout(cell.devices))
        check_micro_batches(self.schedule, self.pipeline, cell.micro_batches)
        if cell.checkpoint != "none" and self.data_axis != "fsdp2":
            raise Refused("torch would save only one part of a weight: use data_axis fsdp2")
        if workload.split and self.tensor > 1:
            workload.split.check_tensor(sequence_parallel=False)

    def export(self, cell: Cell, to: str) -> Export | None:
        workload, layout = make_workload(cell.workload), self.layout(cell.devices)
        if to not in ("torchrun", "slurm") or workload.split is None:
            return None
        if workload.split.exported:
            raise Refused(workload.split.exported)
        values = pipeline_values(workload.split, self.schedule, layout.pipeline, per_rank=1)
        values |= {"plan": {}, "styles": [], "placements": []}
        if layout.tensor > 1:
            values |= tensor_values(workload, workload.split, sequence_parallel=False)
        values |= {
            "axis": self.data_axis,
            "shape": (layout.data, layout.pipeline, layout.tensor),
            "sharded": self.data_axis == "fsdp2",
            "reshards": self.reshards,
            "between_ends": (layout.pipeline - 1) * layout.tensor,
            "loss_said": "The loss is the mean over the ranks that have the last stage.",
            "loss_of_all": f"total.item() / {layout.data * layout.tensor}",
        }
        return Export("three_d.py.j2", values)

    @property
    def reshards(self) -> bool | None:
        """Value of FSDP2's `reshard_after_forward`. It is FSDP2's default, but False with several
        stages, as in torchtitan: otherwise each micro-batch would gather all blocks again."""
        return None if self.pipeline == 1 else False

    def setup(self, job: Job) -> TrainStep:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from harness.seam.pipelining import Pipe, Stage, split_tensors, train_step

        shape = (job.layout.data, job.layout.pipeline, job.layout.tensor)
        mesh = init_device_mesh(
            job.device.type, shape, mesh_dim_names=("data", "pipeline", "tensor")
        )
        data = mesh.get_group("data")
        stage = Stage(job, mesh.get_local_rank("pipeline"), self.pipeline)
        restore = split_tensors(stage, mesh["tensor"]) if self.tensor > 1 else {}
        for module in (*stage.blocks, stage) if self.data_axis == "fsdp2" else ():
            fully_shard(module, mesh=mesh["data"], reshard_after_forward=self.reshards)
        wrap = functools.partial(wrap_stage, axis=self.data_axis, group=data)
        pipe = Pipe(job, self.schedule, [stage], mesh.get_group("pipeline"), wrap)
        optimizer = stage_optimizer(
            job, pipe.parameters, data if self.data_axis == "zero1" else None
        )
        averaged = data if self.data_axis in ("all_reduce", "zero1") else None

        def buckets() -> Iterator[Retained]:
            for part in pipe.torch_stages:
                yield from ddp_buckets(part.submod)

        return train_step(job, pipe, optimizer, averaged, restore=restore, library=buckets)

    @property
    def accumulates_whole_gradients(self) -> bool:
        return self.data_axis == "fsdp2"  # see torch's PipelineStage

    @property
    def zero_stage(self) -> int:
        sharded = 2 if self.reshards is False else 3
        return {"fsdp2": sharded, "zero1": 1}.get(self.data_axis, 0)

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States | None:
        keeps = functools.partial(axis_states, axis=self.data_axis, ranks=layout.data)
        return pipeline_states(cell, layout, facts, self.pipeline_stages(layout), keeps)

    @property
    def pipeline_schedule(self) -> Schedule:
        return self.schedule

    def activation_bytes(self, cell: Cell, layout: Layout, workload: Workload) -> float | None:
        """Adds what FSDP2 holds whole until the last micro-batch: gradients, and parameters unless
        it frees them after forward."""
        held = self.counted_activations(cell, layout, workload)
        if self.data_axis != "fsdp2":
            return held
        split = model_facts(workload).trained_bytes / layout.pipeline / layout.tensor
        whole = 2 if self.reshards is False else 1
        return held + split * (whole - 1 / layout.data)


def axis_states(cell: Cell, part: ModelFacts, axis: str, ranks: int) -> States:
    """Returns states of a rank that shares this part of the model with `ranks` data ranks.

    FSDP2 shards all states (ZeRO-3, arXiv 1910.02054, section 5), ZeroRedundancyOptimizer moments;
    DDP adds buckets.
    """
    if axis == "fsdp2":
        return model_states(cell, part, shards=ranks)
    if axis == "ddp":
        return whole_model_states(cell, part)
    states = model_states(cell, part)
    return dealt_out_states(states, part, ranks) if axis == "zero1" else states


def wrap_stage(stage: Stage, axis: str, group: dist.ProcessGroup) -> nn.Module:
    """Wraps the stage for its data axis. Removes DTensors between forwards, because DDP and
    ZeroRedundancyOptimizer reject them. The first forward has no backward, so DDP needs
    find_unused_parameters."""
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
    from torch.nn.parallel import DistributedDataParallel

    if axis == "fsdp2":
        return stage
    _pre_dp_module_transform(stage)
    stage.register_forward_pre_hook(_with_gradients, prepend=True)
    if axis != "ddp":
        return stage
    return DistributedDataParallel(stage, process_group=group, find_unused_parameters=True)


def _with_gradients(stage: nn.Module, inputs: object) -> None:
    """Rebuilds the stage's DTensors from its local parameters, with gradients enabled.

    Before torch 2.12 the first forward runs without gradients, and DTensors that torch builds in it
    would never pass any on.
    """
    import torch
    from torch.distributed.tensor.parallel.ddp import _reconstruct_dtensor

    with torch.enable_grad():
        _reconstruct_dtensor(stage, inputs)


def stage_optimizer(
    job: Job, parameters: Sequence[nn.Parameter], shards: dist.ProcessGroup | None
) -> Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if shards is None:
        return job.optimizer(parameters)
    kind, kwargs = job.optimizer_class()
    return ZeroRedundancyOptimizer(job.parameter_groups(parameters), kind, shards, **kwargs)
