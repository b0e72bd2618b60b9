"""Hugging Face Accelerate: its wrapper around DDP, DeepSpeed and FSDP2, from its Python API or its
own config file."""

from __future__ import annotations

from pathlib import Path

from harness.strategies import _accelerate
from harness.strategies._accelerate_config import accelerate_export, check_launch, launch_command
from harness.strategies._accelerate_engine import AccelerateEngine, recompute_by_transformers
from harness.strategies._ddp import ddp_buckets
from harness.strategy import Cell, Export, Job, OwnLauncher, TrainStep, Workload


class Accelerate(AccelerateEngine):
    """Hugging Face Accelerate around DDP, DeepSpeed's ZeRO-2 or ZeRO-3, or FSDP2.

    It believes what it finds, so all of it is checked before the first step: without torchrun's
    variables, or without `cpu=True` on a host without a GPU, it takes each rank for a run of its
    own and averages no gradients; on CPUs it takes FSDP for DDP, and fp16 for fp32. Its DeepSpeed
    plugin clips gradients at 1.0 where the config leaves that open, and on CPUs counts one process
    unless the backend is named. The batch is not sharded by its data loader: the harness hands out
    each rank's share.
    """

    config_file: bool = False
    """Let `accelerate launch` start the ranks, from a config.yaml written for the cell, instead of
    the Python API."""

    def check(self, cell: Cell, workload: Workload) -> None:
        super().check(cell, workload)
        if self.config_file:
            check_launch(cell)

    def ddp_equivalent_of(self, cell: Cell) -> str | None:
        name = "Accelerate (config.yaml)" if self.config_file else "Accelerate"
        return name if self.engine == "ddp" else None

    @property
    def own_launcher(self) -> OwnLauncher | None:
        if not self.config_file:
            return None

        def command(cell: Cell, scratch: Path) -> list[str]:
            fsdp2, deepspeed = self.fsdp2_settings(cell), self.deepspeed_config(cell)
            return launch_command(cell, scratch, fsdp2, deepspeed)

        return OwnLauncher("accelerate launch", command)

    def export(self, cell: Cell, to: str) -> Export | None:
        """Its config file says the same as the Python API."""
        if to != "accelerate":
            return None
        fsdp, deepspeed = self.fsdp2_settings(cell), self.deepspeed_config(cell)
        return accelerate_export(cell, fsdp=fsdp, deepspeed=deepspeed)

    def setup(self, job: Job) -> TrainStep:
        fsdp2, deepspeed = self.fsdp2_settings(job.cell), self.deepspeed_config(job.cell)
        accelerator = _accelerate.make_accelerator(job, fsdp2, deepspeed, self.config_file)
        _accelerate.verify(job, accelerator, bool(fsdp2), bool(deepspeed))
        whole = job.model(recompute_by_transformers)
        model, optimizer = accelerator.prepare(whole, job.optimizer(whole.parameters()))
        if self.zero:
            self.zero.register(job, model)
        elif self.engine == "ddp":
            job.register(model, optimizer, library=lambda: ddp_buckets(model))
        else:
            job.register(model, optimizer)
        return _accelerate.train_step(job, accelerator, model, optimizer)
