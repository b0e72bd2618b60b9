from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal, cast

from pydantic import Field

from harness.cell.errors import Refused, Unavailable
from harness.cell.training import Batch, Layout, States, TrainStep
from harness.seam import Capabilities, Cell, Job, ModelFacts, Strategy
from harness.seam.checkpoints import moments_by_torch
from harness.seam.job import backward_of, loss_scaler, own_precision, update_of
from harness.strategies.ddp import Ddp, ddp_buckets
from harness.strategies.fsdp1 import Fsdp1, matrices_of, summoned_parameters, wrap_policy
from harness.strategies.fsdp2_tensor import Fsdp2Tensor, Restore, split_and_shard
from harness.workloads import Workload
from harness.workloads.low_precision import store_as_floats

if TYPE_CHECKING:
    from lightning_fabric.strategies.strategy import Strategy as FabricStrategy
    from torch import Tensor, nn, optim
    from torch.distributed.device_mesh import DeviceMesh


class LightningFabric(Strategy):
    """Lightning Fabric around DDP, FSDP1, or FSDP2 with tensor parallelism (model-parallel).

    Fabric averages only what its wrapper runs: `model.module` trains each rank alone. It does not
    divide losses by the number of micro-batches. Under FSDP1, torch's clipping would use a rank's
    own norm. On CPUs Fabric takes fp16 for bf16.
    """

    requires = ("lightning_fabric",)
    capabilities = Capabilities(precisions=("fp32", "bf16"), checkpoints=(), fused_loss=True)

    engine: Literal["ddp", "fsdp1", "model_parallel"] = "ddp"
    """Fabric's strategy: DDPStrategy, FSDPStrategy or ModelParallelStrategy."""
    tensor: int = Field(default=1, ge=1)
    """Ranks over which `model_parallel` splits each weight; FSDP2 shards over the others."""

    def layout(self, devices: int) -> Layout:
        if devices % self.tensor:
            raise Refused(f"{devices} devices are not divisible by tensor {self.tensor}")
        return Layout(data=devices // self.tensor, tensor=self.tensor)

    @property
    def like(self) -> Strategy:
        """Strategy that trains the same without Fabric."""
        kinds: dict[str, Strategy] = {"ddp": Ddp(), "fsdp1": Fsdp1()}
        return kinds.get(self.engine) or Fsdp2Tensor(tensor=self.tensor)

    def check(self, cell: Cell, workload: Workload) -> None:
        if self.engine != "model_parallel" and self.tensor > 1:
            raise Refused(f"{self.engine} splits no weights: use engine model_parallel")
        self.like.check(cell, workload)
        if self.engine == "fsdp1" and cell.device == "cpu":
            raise Unavailable("Fabric has FSDP on GPUs only; use engine model_parallel, or fsdp1")
        if self.engine == "fsdp1" and cell.precision != "fp32":
            raise Refused("no reference reduces in bf16 as Fabric's FSDP: use fp32, or engine ddp")

    def ddp_equivalent_of(self, cell: Cell) -> str | None:
        return "Lightning Fabric" if self.engine == "ddp" else None

    def setup(self, job: Job) -> TrainStep:
        from lightning_fabric import Fabric
        from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment

        whole, strategy, restore = self.parts(job)
        shapes = {name: p.ndim for name, p in whole.named_parameters()}
        fabric = Fabric(
            accelerator=job.device.type,
            devices=job.local_processes,
            num_nodes=job.cell.nodes,
            strategy=strategy,
            precision="32-true" if job.cell.precision == "fp32" else "bf16-mixed",
            plugins=[TorchElasticEnvironment()],
        )
        fabric.launch()
        model = fabric.setup_module(whole)
        wrapped = model._forward_module
        matrices = matrices_of(wrapped, shapes) if self.engine == "fsdp1" else None
        inner = job.optimizer(wrapped.parameters(), matrices)
        optimizer = cast("optim.Optimizer", fabric.setup_optimizers(inner))
        registered = job.register(wrapped, inner)
        registered.library, registered.restore = lambda: ddp_buckets(wrapped), restore
        if self.engine == "fsdp1":
            registered.gather = lambda: summoned_parameters(wrapped)  # type: ignore[arg-type]
            registered.moments = lambda: moments_by_torch(wrapped, inner)
        if self.engine != "model_parallel":  # torch's clipping fails on weights of several meshes
            job.recipe.clip = lambda most: fabric.clip_gradients(model, optimizer, max_norm=most)
        job, scaler = own_precision(job), loss_scaler(own_precision(job))
        no_sync = functools.partial(fabric.no_backward_sync, model)
        backward = backward_of(job, model, scaler, no_sync, fabric.backward)
        update = update_of(job, optimizer, scaler)

        def step(batch: Batch) -> Tensor:
            loss = backward(batch)
            update()
            return loss

        return step

    def parts(self, job: Job) -> tuple[nn.Module, FabricStrategy, Restore]:
        """Returns the model, Fabric's strategy, and functions that restore split weights."""
        import torch
        from lightning_fabric.strategies.ddp import DDPStrategy
        from lightning_fabric.strategies.fsdp import FSDPStrategy
        from lightning_fabric.strategies.model_parallel import ModelParallelStrategy

        restore: Restore = {}
        if self.engine == "model_parallel":
            from harness.seam.pipelining import Stage

            stage = Stage(job)

            def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
                restore.update(
                    split_and_shard(model, stage, mesh["tensor_parallel"], mesh["data_parallel"])
                )
                return model

            strategy = ModelParallelStrategy(parallelize, job.layout.data, job.layout.tensor)
            return stage.model, strategy, restore
        whole = job.model()
        if self.engine == "ddp":
            return whole, DDPStrategy(), restore
        store_as_floats(whole, torch.float32)
        return whole, FSDPStrategy(auto_wrap_policy=wrap_policy(job, whole)), restore

    @property
    def shards_parameters(self) -> bool:
        return self.like.shards_parameters

    @property
    def accumulates_whole_gradients(self) -> bool:
        return self.like.accumulates_whole_gradients

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States | None:
        return self.like.states(cell, layout, facts)

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        return self.like.traffic(cell, layout, facts)
