from __future__ import annotations

import dataclasses
from pathlib import Path

from pydantic import Field

from harness.cell.errors import Refused
from harness.cell.training import Layout, States, TrainStep
from harness.seam import Capabilities, Cell, Export, Job, ModelFacts, Strategy
from harness.strategies import _deepspeed_engine as engines
from harness.strategies._deepspeed import settle
from harness.strategies.deepspeed import Deepspeed
from harness.workloads import Workload, make_workload


class DeepspeedMoe(Strategy):
    """DeepSpeed's `MoE` layer: experts divided among ranks, the rest data parallel (ZeRO stage 0).

    DeepSpeed 0.19.8 clips to the mean of the ranks' norms, although their experts differ, so cells
    with `clip_norm` are `diverged`. Its gate balances layers separately, so `balance_weight` is
    refused. It pads every expert's rows to those of the busiest expert, so its traffic has no
    formula.
    """

    requires = ("deepspeed",)
    capabilities = Capabilities(
        preload=Deepspeed.capabilities.preload,
        precisions=("fp32",),
        checkpoints=("sharded",),
        reshards=False,
    )

    expert: int = Field(default=2, ge=1)
    """Ranks that share the experts of each layer (`ep_size`)."""

    def check(self, cell: Cell, workload: Workload) -> None:
        if not workload.mixture_path or workload.suffixes:
            raise Refused(
                f"{workload.name} has no experts that DeepSpeed could divide; use a mixtral or"
                " qwen3-moe workload without a suffix"
            )
        if workload.experts_per_token < 2:
            raise Refused(
                "unlike the model, DeepSpeed does not normalise the weight of a token's only"
                " expert; use a workload with 2 or more experts per token"
            )
        if cell.balance_weight:
            raise Refused(
                "DeepSpeed's gate balances each layer separately, but transformers' loss balances"
                " all together; use distributed_config, or balance_weight 0"
            )
        for what, count in (("devices", cell.devices), ("experts", workload.experts)):
            if count % self.expert:
                raise Refused(
                    f"{count} {what} are not divisible by expert {self.expert}; use a divisor of"
                    f" {count}"
                )

    def export(self, cell: Cell, to: str) -> Export | None:
        plain = None if to == "accelerate" else Deepspeed(stage=0).export(cell, to)
        text = Path(__file__).with_name("_deepspeed_moe.py").read_text()
        classes = text[text.index("class Expert") : text.index("def replace_mixtures")].strip()
        values = {"classes": classes, "saves": False}
        return plain and dataclasses.replace(
            plain, template="deepspeed_moe.py.j2", values=plain.values | values
        )

    def setup(self, job: Job) -> TrainStep:
        settle(job.device.type, job.local_processes)
        import deepspeed

        from harness.strategies import _deepspeed_moe as moe

        model, zero = job.model(), Deepspeed(stage=0)
        mixtures = moe.replace_mixtures(model, job.workload, self.expert, job.rank)
        sizes = [p.numel() for p in model.parameters()]
        config = zero.config(job.cell, job.layout, sizes)
        optimizer = job.optimizer(model.parameters())
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=config,
            lr_scheduler=job.scheduler(optimizer),
        )
        moe.check_groups(mixtures)
        registered = job.register(engine.module, engine.basic_optimizer)
        registered.gather = lambda: moe.whole_parameters(engine, mixtures)
        registered.states = lambda: engines.retained_by_engine(engine)
        registered.waits = engines.engine_waits(engine)
        registered.routers = moe.routers(mixtures)
        engines.save_by_engine(job, engine)
        return engines.engine_step(job, engine)

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        inside = make_workload(cell.workload).mixture_path + ".experts."
        sizes = [
            size // self.expert if inside in name else size
            for name, size in zip(facts.trainable, facts.sizes, strict=True)
        ]
        size = facts.trained_bytes * sum(sizes) // sum(facts.sizes)
        local_facts = dataclasses.replace(
            facts, sizes=tuple(sizes), parameter_bytes=size, trained_bytes=size
        )
        return Deepspeed(stage=0).states(cell, layout, local_facts)
