from __future__ import annotations

from pathlib import Path

from harness.cell.training import TrainStep
from harness.seam import Cell, Export, Job, OwnLauncher
from harness.strategies import _accelerate
from harness.strategies._accelerate import AccelerateEngine, recompute_by_transformers
from harness.strategies._accelerate_config import accelerate_export, check_launch, launch_command
from harness.strategies.ddp import ddp_buckets
from harness.workloads import Workload
from harness.workloads.low_precision import store_as_floats


class Accelerate(AccelerateEngine):
    """Hugging Face Accelerate around DDP, DeepSpeed ZeRO-2 or ZeRO-3, or FSDP2.

    Accelerate infers its set-up from the environment, so it is verified before the first step.
    Without torchrun's variables, or `cpu=True` without a GPU, ranks train alone. On CPUs it
    silently runs FSDP as DDP and fp16 as fp32. Its DeepSpeed plugin clips gradients at 1.0 unless
    configured.
    """

    config_file: bool = False
    """Start the ranks by `accelerate launch` from a config.yaml, not through the Python API."""

    def check(self, cell: Cell, workload: Workload) -> None:
        super().check(cell, workload)
        if self.config_file:
            check_launch(cell)

    def ddp_equivalent_of(self, cell: Cell) -> str | None:
        name = "Accelerate (config.yaml)" if self.config_file else "Accelerate"
        return name if self.engine == "ddp" else None

    @property
    def own_launcher(self) -> OwnLauncher | None:
        return OwnLauncher("accelerate launch", self._launch_command) if self.config_file else None

    def _launch_command(self, cell: Cell, scratch: Path) -> list[str]:
        fsdp2, deepspeed = self.fsdp2_settings(cell), self.deepspeed_config(cell)
        return launch_command(cell, scratch, fsdp2, deepspeed)

    def export(self, cell: Cell, to: str) -> Export | None:
        if to != "accelerate":
            return None
        fsdp, deepspeed = self.fsdp2_settings(cell), self.deepspeed_config(cell)
        return accelerate_export(cell, fsdp=fsdp, deepspeed=deepspeed)

    def setup(self, job: Job) -> TrainStep:
        fsdp2, deepspeed = self.fsdp2_settings(job.cell), self.deepspeed_config(job.cell)
        accelerator = _accelerate.make_accelerator(job, fsdp2, deepspeed, self.config_file)
        _accelerate.verify(job, accelerator, bool(fsdp2), bool(deepspeed))
        whole = job.model(recompute_by_transformers)
        if fsdp2:
            store_as_floats(whole, job.dtype())
        model, optimizer = accelerator.prepare(whole, job.optimizer(whole.parameters()))
        if self.zero:
            self.zero.register(job, model)
        else:
            job.register(model, optimizer).library = lambda: ddp_buckets(model)
        scheduler = _accelerate.prepare_scheduler(job, accelerator, optimizer)
        state = _accelerate.AccelerateState(accelerator)
        job.save_by(state.save, state.load)
        return _accelerate.train_step(job, accelerator, model, optimizer, scheduler)
