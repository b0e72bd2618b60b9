"""ZeRO training with DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from harness.strategies import _deepspeed_engine as engines
from harness.strategies._deepspeed import settle
from harness.strategies._deepspeed_zero import ZeroOptions
from harness.strategy import Job, TrainStep

if TYPE_CHECKING:
    from types import ModuleType

    from deepspeed import DeepSpeedEngine
    from torch import Tensor, nn


class ZeroTraining(ZeroOptions):
    """ZeRO training by DeepSpeed's engine, in overridable parts."""

    def setup(self, job: Job) -> TrainStep:
        settle(job.device.type, job.local_processes)
        import deepspeed

        model = self.build(job)
        folder = engines.emptied_folder(job, self.folder)
        sizes = [p.numel() for p in model.parameters() if p.requires_grad]
        config = self.config(job.cell, job.layout, sizes, folder)
        optimizer = engines.zero_optimizer(job, model, self.offload_optimizer != "none")
        groups = self.groups(job, model)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, mpu=groups
        )
        if self.stage == 0:
            engines.undo_first_step(engine)
        self.register(job, engine, folder if self.on_disk else None)
        return self.train_step(job, engine)

    def build(self, job: Job) -> nn.Module:
        return job.model()

    def groups(self, job: Job, model: nn.Module) -> ModuleType | None:
        """Returns DeepSpeed's `mpu`, which assigns ranks to groups; None: all ranks are data
        parallel."""
        return None

    def train_step(self, job: Job, engine: DeepSpeedEngine) -> TrainStep:
        return engines.engine_step(job, engine)

    def register(self, job: Job, engine: DeepSpeedEngine, folder: Path | None = None) -> None:
        """Registers an engine, which another library may have built, with the harness."""
        job.register(
            engine.module,
            engine.basic_optimizer,
            gather=lambda: self.whole(engine),
            states=lambda: engines.retained_by_engine(engine),
            waits=engines.engine_waits(engine),
            offload_folder=folder,
        )

    def whole(self, engine: DeepSpeedEngine) -> Iterator[tuple[str, Tensor]]:
        """Yields whole parameters by name, or their fp32 masters if any."""
        return engines.full_parameters(engine)
