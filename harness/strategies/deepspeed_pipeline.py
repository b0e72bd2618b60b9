from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from harness.cell.training import Batch, Layout, Retained, TrainStep
from harness.seam import Capabilities, Cell, Export, Job, Strategy
from harness.seam.formulas import KEPT_RESULTS, logits_bytes
from harness.strategies import _deepspeed_engine as engines
from harness.strategies._accelerate_config import deepspeed_parts
from harness.strategies._deepspeed import settle
from harness.strategies._deepspeed_zero import deepspeed_config
from harness.strategies.pipeline import pipeline_export
from harness.workloads import Workload

if TYPE_CHECKING:
    from deepspeed.pipe import LayerSpec
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from torch import Tensor

    from harness.seam import ModelFacts, States
    from harness.seam.pipelining import Stage


class DeepspeedPipeline(Strategy):
    """DeepSpeed's PipelineModule: one stage per rank, 1F1B, micro-batches as gradient accumulation.

    TiedLayerSpec sums the gradients of parameters tied between the end stages.
    """

    requires = ("deepspeed",)
    capabilities = Capabilities(
        precisions=("fp32",), checkpoints=("sharded",), reshards=False, stages=True
    )

    def layout(self, devices: int) -> Layout:
        return Layout(pipeline=devices)

    def check(self, cell: Cell, workload: Workload) -> None:
        workload.check_split(self.layout(cell.devices))

    def export(self, cell: Cell, to: str) -> Export | None:
        plan = pipeline_export(cell, to, "1f1b", template="deepspeed_pipeline.py.j2")
        config = deepspeed_config(cell, Layout())
        return plan and dataclasses.replace(plan, **deepspeed_parts(cell, config))

    def setup(self, job: Job) -> TrainStep:
        settle(job.device.type, job.local_processes)
        import deepspeed
        from deepspeed.pipe import PipelineModule

        from harness.seam.pipelining import Stage

        deepspeed.init_distributed(verbose=False)
        count = job.layout.pipeline
        layers = [self.layer(job, index) for index in range(count)]
        current: list[float | None] = [None]  # label tokens of the step's micro-batches

        def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
            return job.workload.loss(logits, labels, current[0])

        options = {"loss_fn": loss_of, "partition_method": "uniform"}
        module = PipelineModule(layers, num_stages=count, **options)
        (stage,) = (m for m in module.modules() if isinstance(m, Stage))
        count_in_norm(stage)
        optimizer = job.optimizer(module.parameters())
        config = deepspeed_config(job.cell, job.layout)
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config=config,
            lr_scheduler=job.scheduler(optimizer),
        )
        engines.keep_norm(engine)
        buffers, timed = functools.partial(pipeline_buffers, engine), timed_instructions(engine)
        registered = job.register(stage.model, engine.basic_optimizer)
        registered.library = buffers
        registered.compute = timed
        engines.save_by_engine(job, engine)
        parts = job.cell.micro_batches
        keys: list[Tensor | None] = []

        def next_keys(*_: object) -> None:
            job.recipe.masks.keys = keys.pop(0)

        if job.cell.dropout:  # each stage computes micro-batches in order
            stage.register_forward_pre_hook(next_keys)

        def step(batch: Batch) -> Tensor:
            micro_batches = list(batch.split(parts))
            keys[:] = [part.keys for part in micro_batches]
            current[0] = micro_batches[0].label_tokens
            loss: Tensor = engine.train_batch((part.inputs, part.labels) for part in micro_batches)
            job.recipe.gradient_norm = engine.get_global_grad_norm()
            return loss

        return step

    def layer(self, job: Job, index: int) -> LayerSpec:
        from deepspeed.pipe import LayerSpec, TiedLayerSpec

        from harness.seam.pipelining import Stage

        count, split = job.layout.pipeline, job.workload.split
        assert split is not None
        shared = {
            0: [f"model.{owner}" for owner in split.tied.values()],
            count - 1: [f"model.{name}" for name in split.tied],
        }.get(index)
        if count == 1 or not shared:
            return LayerSpec(Stage, job, index, count)
        return TiedLayerSpec("tied", Stage, job, index, count, tied_weight_attr=shared)

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States | None:
        from harness.seam.formulas import pipeline_states
        from harness.workloads import make_workload

        workload = make_workload(cell.workload)
        buffers = functools.partial(engine_buffers, cell=cell, workload=workload)
        return pipeline_states(cell, layout, facts, self.pipeline_stages(layout), buffers=buffers)


def count_in_norm(stage: Stage) -> None:
    """Marks a stage's parameters as model parallel, except copies of the first stage's. In the
    gradient norm, DeepSpeed 0.19.8 counts only parameters with this mark and those of the first
    stage, but it marks none."""
    copies = stage.split.tied if stage.last and not stage.first else {}
    for name, parameter in stage.model.named_parameters():
        parameter.model_parallel = name not in copies  # type: ignore[attr-defined]


def timed_instructions(engine: PipelineEngine) -> list[tuple[object, str]]:
    """Returns the engine's compute methods, for TrainState.

    Makes the engine call the instance's methods, which the harness wraps, instead of its class's.
    """
    names = {kind: method.__name__ for kind, method in engine._INSTRUCTION_MAP.items()}
    engine._INSTRUCTION_MAP = {kind: _by_name(name) for kind, name in names.items()}
    computing = ("_exec_forward_pass", "_exec_backward_pass", "_exec_optimizer_step")
    return [(engine, name) for name in computing]


def _by_name(name: str) -> Callable[..., object]:
    return lambda engine, **arguments: getattr(engine, name)(**arguments)


def pipeline_buffers(engine: PipelineEngine) -> Iterator[Retained]:
    import torch
    from torch.utils._pytree import tree_leaves

    buffers = (engine.pipe_buffers, engine.pipe_recv_buf, engine.grad_layer, engine._grad_layer_buf)
    for leaf in tree_leaves(buffers):
        if isinstance(leaf, torch.Tensor):
            yield "library", "activations in the pipeline", leaf


def engine_buffers(stage: int, count: int, hidden: float, cell: Cell, workload: Workload) -> float:
    """Returns bytes of the engine's buffers in stage `stage` of `count` between steps.

    Each boundary adds one micro-batch's hidden states or gradients, the ends token ids, results and
    labels (DeepSpeed 0.19, runtime/pipe/engine.py). `hidden`: bytes of hidden states of a rank's
    samples.
    """
    parts = cell.micro_batches
    samples, tokens = cell.global_batch // parts, cell.sequence_length
    buffer_bytes = ((stage > 0) + (stage < count - 1)) * hidden / parts
    if stage == 0:
        buffer_bytes += min(parts, max(KEPT_RESULTS, count)) * samples * tokens * 8
    if stage == count - 1:
        labels = samples * (1 if workload.num_labels else tokens) * 8
        buffer_bytes += min(parts, KEPT_RESULTS) * (
            logits_bytes(workload, samples, tokens) + labels
        )
    return buffer_bytes
