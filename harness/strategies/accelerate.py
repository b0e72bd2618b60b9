"""Hugging Face Accelerate: its wrapper around DDP, DeepSpeed and FSDP2, from its Python API or its
own config file."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from harness.spec.cell import Cell
from harness.spec.errors import Refused, Unavailable
from harness.spec.training import EXACT, Batch, Layout, States, Tolerance, TrainStep
from harness.strategies._accelerate import make_accelerator, pretend_gpus, verify
from harness.strategies._accelerate_config import accelerate_export, fsdp2_settings, launch_config
from harness.strategies._ddp import ddp_buckets
from harness.strategies.deepspeed import Deepspeed
from harness.strategy.base import Export, Strategy
from harness.strategy.formulas import model_states, whole_model_states
from harness.strategy.job import Job
from harness.strategy.step import own_precision
from harness.workloads import make_workload
from harness.workloads.counts import model_facts

if TYPE_CHECKING:
    from torch import Tensor

    from harness.workloads import Workload
    from harness.workloads.counts import ModelFacts

PROGRAM = Path(sys.executable).with_name("accelerate")
FSDP2_HALF = Tolerance(
    5e-2,
    1.0,
    "Accelerate has FSDP2 compute and reduce gradients in bf16, the residual stream and the"
    " norms too",
)


class Accelerate(Strategy):
    """Hugging Face Accelerate around DDP, DeepSpeed's ZeRO-2 or ZeRO-3, or FSDP2.

    It believes what it finds, so all of it is checked before the first step: without torchrun's
    variables, or without `cpu=True` on a host without a GPU, it takes each rank for a run of its
    own and averages no gradients; on CPUs it takes FSDP for DDP, and fp16 for fp32. Its DeepSpeed
    plugin clips gradients at 1.0 where the config leaves that open, and on CPUs counts one process
    unless the backend is named. The batch is not sharded by its data loader: the harness hands out
    each rank's share.
    """

    requires = ("accelerate",)

    engine: Literal["ddp", "zero2", "zero3", "fsdp2"] = "ddp"
    """What it wraps: DDP, DeepSpeed's ZeRO stage 2 or 3 through its plugin, or FSDP2."""
    config_file: bool = False
    """Let `accelerate launch` start the ranks, from a config.yaml written for the cell, instead of
    the Python API."""

    @property
    def zero(self) -> Deepspeed | None:
        """The same without Accelerate, where DeepSpeed is the engine."""
        return (
            Deepspeed(stage=2 if self.engine == "zero2" else 3)
            if self.engine.startswith("zero")
            else None
        )

    @property
    def shards_parameters(self) -> bool:
        return self.engine in ("zero3", "fsdp2")

    def check(self, cell: Cell, workload: Workload) -> None:
        if cell.precision == "fp16" and cell.device == "cpu" and not self.zero:
            raise Unavailable(
                "Accelerate has no fp16 on CPUs and would train in fp32 without a word: it needs a"
                " GPU, or bf16"
            )
        if self.engine == "fsdp2" and workload.kind == "image":
            raise Refused(
                "Accelerate's FSDP2 asks the model for its token embeddings, which image models do"
                " not have; use fsdp2"
            )
        if self.config_file and cell.launcher == "spawn":
            raise Refused(
                "with a config file `accelerate launch` starts the ranks: leave the launcher out"
            )
        if self.config_file and not PROGRAM.exists():
            raise Unavailable(
                f"there is no program accelerate beside {sys.executable}: install the package anew"
            )
        if self.zero:
            if importlib.util.find_spec("deepspeed") is None:
                raise Unavailable(
                    "package deepspeed is not installed: pip install 'parallelism-bench[deepspeed]'"
                )
            self.zero.check(cell, workload)

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        if self.zero:
            return self.zero.tolerance(cell, workload)
        return FSDP2_HALF if self.engine == "fsdp2" and cell.precision != "fp32" else EXACT

    def stand_in(self, cell: Cell) -> str | None:
        by_hand = self.engine == "fsdp2" and cell.device == "cpu"
        return (
            "Accelerate has FSDP2 on GPUs only: told to be on one, its own preparation then runs"
            " over gloo"
            if by_hand
            else None
        )

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States | None:
        if self.zero:
            return self.zero.states(cell, layout, facts)
        return (
            whole_model_states(cell, facts)
            if self.engine == "ddp"
            else model_states(cell, facts, shards=cell.devices)
        )

    def same_as_ddp(self, cell: Cell) -> str | None:
        return (
            {False: "Accelerate", True: "Accelerate (config.yaml)"}[self.config_file]
            if self.engine == "ddp"
            else None
        )

    @property
    def one_node(self) -> str | None:
        return "accelerate launch" if self.config_file else None

    def command(self, cell: Cell, scratch: Path) -> list[str] | None:
        if not self.config_file:
            return None
        file, deepspeed_file = scratch / "config.yaml", scratch / "ds_config.json"
        if self.zero:
            deepspeed_file.write_text(json.dumps(self.deepspeed_config(cell)))
        config = launch_config(
            cell,
            fsdp=self.fsdp2_settings(cell),
            deepspeed_file=str(deepspeed_file) if self.zero else None,
        )
        file.write_text(yaml.safe_dump(config, sort_keys=False))
        return [str(PROGRAM), "launch", "--config_file", str(file)]

    def export(self, cell: Cell, to: str) -> Export | None:
        """Its config file says the same as the Python API."""
        deepspeed = self.deepspeed_config(cell) if self.zero else None
        return (
            accelerate_export(cell, fsdp=self.fsdp2_settings(cell), deepspeed=deepspeed)
            if to == "accelerate"
            else None
        )

    def fsdp2_settings(self, cell: Cell) -> dict[str, Any] | None:
        return fsdp2_settings(make_workload(cell.workload)) if self.engine == "fsdp2" else None

    def deepspeed_config(self, cell: Cell) -> dict[str, Any]:
        """DeepSpeed's own for the cell, with all three batch sizes in it."""
        assert self.zero
        return self.zero.config(
            cell,
            self.layout(cell.devices),
            model_facts(make_workload(cell.workload), cell.sequence_length).sizes,
            "",
        )

    def setup(self, job: Job) -> TrainStep:
        import torch

        accelerator = self.accelerator(job)
        self.verify(job, accelerator)
        whole = job.model()
        model, optimizer = accelerator.prepare(whole, job.optimizer(whole.parameters()))
        if zero := self.zero:
            zero.register(job, model)
        else:
            job.register(
                model,
                optimizer,
                library=(lambda: ddp_buckets(model)) if self.engine == "ddp" else None,
            )
        plain, parts = own_precision(job), job.cell.micro_batches

        def step(batch: Batch) -> Tensor:
            total = torch.zeros((), device=job.device)
            for part in batch.split(parts):
                with accelerator.accumulate(model):
                    loss = plain.loss(model, part)
                    accelerator.backward(
                        loss
                    )  # divides by the number of micro-batches; DeepSpeed's also steps
                    optimizer.step()  # nothing before the last micro-batch
                    optimizer.zero_grad()
                total += loss.detach() / parts
            return total

        return step

    def accelerator(self, job: Job) -> Any:
        """Accelerate's own object."""
        if self.engine == "fsdp2" and job.device.type == "cpu":
            self.pretend()
        deepspeed = self.deepspeed_config(job.cell) if self.zero else None
        return make_accelerator(
            job, self.fsdp2_settings(job.cell), deepspeed, told=self.config_file
        )

    def pretend(self) -> None:
        pretend_gpus()

    def verify(self, job: Job, accelerator: Any) -> None:
        verify(job, accelerator, fsdp2=self.engine == "fsdp2", deepspeed=bool(self.zero))
