"""DeepSpeed's pipeline module: stages on ranks, one forward, one backward (1F1B)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from harness.spec.cell import Cell
from harness.spec.training import Batch, Layout, Retained, TrainStep
from harness.strategies._deepspeed import deepspeed_config, settle
from harness.strategy.base import Strategy
from harness.strategy.job import Job

if TYPE_CHECKING:
    from torch import Tensor

    from harness.workloads import Workload


class DeepspeedPipeline(Strategy):
    """DeepSpeed's PipelineModule: a stage per rank, 1F1B; micro-batches are its gradient
    accumulation.

    Parameters that are tied across the first and the last stage are tied by TiedLayerSpec, which
    adds up their gradients.
    """

    requires = ("deepspeed",)
    precisions = ("fp32",)

    def layout(self, devices: int) -> Layout:
        return Layout(pipeline=devices)

    def check(self, cell: Cell, workload: Workload) -> None:
        workload.check_split(self.layout(cell.devices))

    def setup(self, job: Job) -> TrainStep:
        settle(job.device.type, job.local_processes)
        import deepspeed
        from deepspeed.pipe import PipelineModule

        from harness.strategy.stage import Stage

        deepspeed.init_distributed(verbose=False)
        count = job.layout.pipeline
        module = PipelineModule(
            [self.layer(job, index) for index in range(count)],
            num_stages=count,
            loss_fn=job.workload.loss,
            partition_method="uniform",
        )
        (stage,) = (m for m in module.modules() if isinstance(m, Stage))
        config = deepspeed_config(job.cell, job.layout, 0)
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=job.optimizer(module.parameters()), config=config
        )
        # The engine looks its instructions up in its class; the harness wraps those of the instance
        # to see how long they take.
        instructions = {kind: f.__name__ for kind, f in engine._INSTRUCTION_MAP.items()}
        engine._INSTRUCTION_MAP = {kind: _named(name) for kind, name in instructions.items()}
        job.register(
            stage.model,
            engine.basic_optimizer,
            library=lambda: _buffers(engine),
            compute=[
                (engine, name)
                for name in ("_exec_forward_pass", "_exec_backward_pass", "_exec_optimizer_step")
            ],
        )
        parts = job.cell.micro_batches

        def step(batch: Batch) -> Tensor:
            loss: Tensor = engine.train_batch(
                (part.inputs, part.labels) for part in batch.split(parts)
            )
            return loss

        return step

    def layer(self, job: Job, index: int) -> Any:
        """What makes stage `index` on the rank that has it."""
        from deepspeed.pipe import LayerSpec, TiedLayerSpec

        from harness.strategy.stage import Stage

        count, split = job.layout.pipeline, job.workload.split
        assert split is not None
        shared = {
            0: [f"model.{owner}" for owner in split.tied.values()],
            count - 1: [f"model.{name}" for name in split.tied],
        }.get(index)
        if count == 1 or not shared:
            return LayerSpec(Stage, job, index, count)
        return TiedLayerSpec("tied", Stage, job, index, count, tied_weight_attr=shared)


def _buffers(engine: Any) -> Iterator[Retained]:
    """Activations and their gradients, which the engine keeps until the next batch takes their
    place."""
    import torch
    from torch.utils._pytree import tree_leaves

    kept = (engine.pipe_buffers, engine.pipe_recv_buf, engine.grad_layer, engine._grad_layer_buf)
    yield from (
        ("library", "activations in the pipeline", one)
        for one in tree_leaves(kept)
        if isinstance(one, torch.Tensor)
    )


def _named(name: str) -> Any:
    return lambda engine, **told: getattr(engine, name)(**told)
