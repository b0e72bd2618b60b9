"""DeepSpeed's pipeline module."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from harness.strategies._deepspeed import settle
from harness.strategies._deepspeed_pipe import pipeline_buffers, timed_instructions
from harness.strategies._deepspeed_zero import deepspeed_config
from harness.strategy import (
    Batch,
    Capabilities,
    Cell,
    CostModel,
    Job,
    Layout,
    Strategy,
    TrainStep,
    Workload,
)

if TYPE_CHECKING:
    from deepspeed.pipe import LayerSpec
    from torch import Tensor

    from harness.strategy import ModelFacts, States


class DeepspeedPipeline(Strategy):
    """DeepSpeed's PipelineModule: one stage per rank, 1F1B, micro-batches as accumulation.

    Parameters tied between the first and last stage use TiedLayerSpec, which sums their gradients.
    """

    requires = ("deepspeed",)
    capabilities = Capabilities(precisions=("fp32",))

    def layout(self, devices: int) -> Layout:
        return Layout(pipeline=devices)

    def check(self, cell: Cell, workload: Workload) -> None:
        workload.check_split(self.layout(cell.devices))

    @property
    def costs(self) -> DeepspeedPipelineCosts:
        return DeepspeedPipelineCosts(self)

    def setup(self, job: Job) -> TrainStep:
        settle(job.device.type, job.local_processes)
        import deepspeed
        from deepspeed.pipe import PipelineModule

        from harness.strategy.stage import Stage

        deepspeed.init_distributed(verbose=False)
        count = job.layout.pipeline
        layers = [self.layer(job, index) for index in range(count)]
        options = {"loss_fn": job.workload.loss, "partition_method": "uniform"}
        module = PipelineModule(layers, num_stages=count, **options)
        (stage,) = (m for m in module.modules() if isinstance(m, Stage))
        optimizer = job.optimizer(module.parameters())
        config = deepspeed_config(job.cell, job.layout)
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        buffers, timed = functools.partial(pipeline_buffers, engine), timed_instructions(engine)
        job.register(stage.model, engine.basic_optimizer, library=buffers, compute=timed)
        parts = job.cell.micro_batches

        def step(batch: Batch) -> Tensor:
            pairs = ((part.inputs, part.labels) for part in batch.split(parts))
            loss: Tensor = engine.train_batch(pairs)
            return loss

        return step

    def layer(self, job: Job, index: int) -> LayerSpec:
        """Returns the spec that builds stage `index` on its rank."""
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


class DeepspeedPipelineCosts(CostModel[DeepspeedPipeline]):
    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States | None:
        """Returns a stage's states and engine buffers, see `engine_buffers`."""
        from harness.strategies._deepspeed_pipe_formulas import engine_buffers
        from harness.strategy.formulas import a_stage_each, pipeline_states
        from harness.workloads import make_workload

        workload = make_workload(cell.workload)
        buffers = functools.partial(engine_buffers, cell=cell, workload=workload)
        return pipeline_states(cell, layout, facts, a_stage_each(layout), buffers=buffers)

    def activation_bytes(self, cell: Cell, layout: Layout, workload: Workload) -> float | None:
        """Returns bytes of 1F1B's micro-batches in flight and the engine's input copies, see
        `held_beside_gradients`.

        torch's memory tracker (`bench profile`) shows 1.1 to 1.3 MB more on the last stage
        (llama-128x4, two ranks). The formula agrees with torch's allocator, see
        docs/studies/recompute-memory.md.
        """
        from harness.strategy.formulas import a_stage_each
        from harness.strategy.pipeline_memory import Engine, held_beside_gradients

        engine = Engine("1f1b", copies_inputs=True)
        return held_beside_gradients(cell, layout, workload, a_stage_each(layout), engine)
