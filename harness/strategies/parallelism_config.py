from __future__ import annotations

import functools
from importlib.metadata import version
from typing import TYPE_CHECKING, cast

from harness.cell.errors import Refused, Unavailable
from harness.cell.training import EXACT, Layout, States, Tolerance, TrainStep
from harness.seam import Cell, Job, ModelFacts
from harness.seam.optimizers import with_dtensors_apart
from harness.strategies import _accelerate
from harness.strategies import _distributed as mesh
from harness.strategies._accelerate import recompute_by_transformers
from harness.strategies._accelerate_config import fsdp2_settings
from harness.strategies._half import WHOLLY, half_throughout
from harness.strategies._mesh_traffic import sharded_traffic, tensor_traffic
from harness.workloads import Workload, make_workload

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ParallelismConfigMesh(mesh.MeshStrategy):
    """Accelerate with a `ParallelismConfig`: FSDP2, replicated or not, or tensor parallelism.

    On CPUs, see `pretend_gpus`; ranks communicate over gloo.
    """

    requires = ("accelerate",)

    def check(self, cell: Cell, workload: Workload) -> None:
        if self.tensor > 1:
            mesh.check_version()
        super().check(cell, workload)
        sizes = self.sizes(cell.devices)
        if sizes.tensor > 1 and sizes.shards * sizes.replicas > 1:
            raise Unavailable(
                f"Accelerate {version('accelerate')} combines tensor parallelism with FSDP2 through"
                f" ReplicateParallel, which transformers {version('transformers')} no longer has;"
                " use distributed_config"
            )
        if sizes.replicas > 1 and sizes.shards == 1:
            raise Refused(
                f"Accelerate shards within each of the {sizes.replicas} replicas, which have 1"
                " device each; use more devices, fewer replicas, or ddp"
            )

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        return WHOLLY if self.tensor == 1 and cell.precision != "fp32" else EXACT

    def reference(self, cell: Cell) -> Cell:
        wholly = self.tensor == 1 and cell.precision != "fp32"
        return half_throughout(cell, self.layout(cell.devices)) if wholly else cell.reference()

    def stand_in(self, cell: Cell) -> str | None:
        real = "Accelerate takes a ParallelismConfig on GPUs only; it is told that the CPU is one,"
        return f"{real} and communicates over gloo" if cell.device == "cpu" else None

    def setup(self, job: Job) -> TrainStep:
        from accelerate.parallelism_config import ParallelismConfig

        sizes = self.sizes(job.cell.devices)
        whole = mesh.load(job, sizes) if self.tensor > 1 else job.model(recompute_by_transformers)
        config = ParallelismConfig(
            dp_replicate_size=sizes.replicas, dp_shard_size=sizes.shards, tp_size=sizes.tensor
        )
        fsdp2 = None if self.tensor > 1 else fsdp2_settings(job.workload)
        accelerator = _accelerate.make_accelerator(job, fsdp2, None, False, config)
        _accelerate.verify(job, accelerator, bool(fsdp2), deepspeed=False)
        model, optimizer = accelerator.prepare(whole, job.optimizer(whole.parameters()))
        with_dtensors_apart(optimizer)
        job.register(model, optimizer).states = lambda: mesh.retained_parts(model, optimizer)
        scheduler = _accelerate.prepare_scheduler(job, accelerator, optimizer)
        return _accelerate.train_step(job, accelerator, model, optimizer, scheduler)

    @property
    def accumulates_whole_gradients(self) -> bool:
        return self.tensor == 1

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States | None:
        sizes = self.sizes(cell.devices)
        if sizes.tensor > 1:
            return super().states(cell, layout, facts)
        return _accelerate.fsdp2_states(cell, facts, sizes.shards)

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        workload, sizes = make_workload(cell.workload), self.sizes(cell.devices)
        if sizes.tensor > 1:
            return tensor_traffic(cell, layout, workload, sizes, facts)
        freed = freed_modules(workload)
        return sharded_traffic(cell, layout, workload, sizes, facts, freed)


@functools.cache
def freed_modules(workload: Workload) -> tuple[str, ...]:
    """Returns paths of modules that Accelerate's FSDP2 frees after forward: blocks and, unless the
    head shares its weight, the input embedding."""
    if workload.tied:
        return workload.block_paths
    model = cast("PreTrainedModel", workload.on_meta())
    embedding = model.get_input_embeddings()
    path = next(path for path, module in model.named_modules() if module is embedding)
    return (*workload.block_paths, path)
