"""DeepSpeed ZeRO: stages 0 to 3, states kept on the device, in host memory or on a disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from harness.spec.training import EXACT, Layout, States, Tolerance, TrainStep
from harness.strategies import _deepspeed_engine as engines
from harness.strategies import _deepspeed_formulas as formulas
from harness.strategies._deepspeed import settle
from harness.strategies._deepspeed_export import zero_export
from harness.strategies._deepspeed_zero import ZeroOptions
from harness.strategy import Cell, Export, Job
from harness.workloads import Workload
from harness.workloads.counts import ModelFacts

if TYPE_CHECKING:
    from types import ModuleType

    from deepspeed import DeepSpeedEngine
    from torch import Tensor, nn


class Deepspeed(ZeroOptions):
    """DeepSpeed ZeRO: stage 0 averages gradients, 1 shards the optimizer, 2 gradients too, 3
    parameters too.

    fp16 and bf16 are DeepSpeed's own: half weights, gradients summed and sent in half, and fp32
    masters that start from the rounded weights. Only stages 1 to 3 scale fp16's loss. The optimizer
    is torch's; where it is offloaded it is DeepSpeed's CPU Adam, the same AdamW up to rounding.
    Stages 1 to 3 keep an fp32 master of the rank's partition also beside fp32 parameters: stage 3
    asks whether the two can be one by comparing a device with its name, which never agrees.
    """

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        return engines.HALF if cell.precision == "bf16" else EXACT

    def same_as_ddp(self, cell: Cell) -> str | None:
        plain = self.stage == 0 and self.model_fields_set <= {"stage"}
        return "DeepSpeed stage 0" if plain else None

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        return formulas.zero_states(self, cell, layout, facts)

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        return formulas.zero_traffic(self, cell, layout, facts)

    def moved_bytes(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float:
        return formulas.zero_moves(self, facts)

    def export(self, cell: Cell, to: str) -> Export | None:
        return zero_export(self, cell, to)

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
        """What tells DeepSpeed which ranks do what; None: all of them are data parallel."""
        return None

    def train_step(self, job: Job, engine: DeepSpeedEngine) -> TrainStep:
        return engines.engine_step(job, engine)

    def register(self, job: Job, engine: DeepSpeedEngine, folder: Path | None = None) -> None:
        """Shows an engine to the harness, also one that another library made."""
        job.register(
            engine.module,
            engine.basic_optimizer,
            gather=lambda: self.whole(engine),
            states=lambda: engines.retained_by_engine(engine),
            waits=engines.engine_waits(engine),
            offload_folder=folder,
        )

    def whole(self, engine: DeepSpeedEngine) -> Iterator[tuple[str, Tensor]]:
        """Parameters by name, whole; their fp32 masters where there are any."""
        return engines.full_parameters(engine)
