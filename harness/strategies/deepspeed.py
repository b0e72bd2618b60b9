"""DeepSpeed ZeRO: stages 0 to 3, states kept on the device, in host memory or on a disk."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from harness.spec.cell import Cell
from harness.spec.training import EXACT, Batch, Layout, States, Tolerance, TrainStep
from harness.strategies import _deepspeed_states as memory
from harness.strategies._accelerate_config import accelerate_export, deepspeed_variables
from harness.strategies._deepspeed import (
    PERSISTENT_ELEMENTS,
    Place,
    check_zero,
    deepspeed_config,
    missing,
    settle,
)
from harness.strategy.base import Export, Strategy
from harness.strategy.job import Job
from harness.strategy.step import own_precision
from harness.workloads import Workload, make_workload
from harness.workloads.counts import ModelFacts, model_facts

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


HALF = Tolerance(
    6e-3,
    0.12,
    "DeepSpeed starts from weights rounded to bf16, and sums and sends gradients in bf16",
)


class Deepspeed(Strategy):
    """DeepSpeed ZeRO: stage 0 averages gradients, 1 shards the optimizer, 2 gradients too, 3
    parameters too.

    fp16 and bf16 are DeepSpeed's own: half weights, gradients summed and sent in half, and fp32
    masters that start from the rounded weights. Only stages 1 to 3 scale fp16's loss. The optimizer
    is torch's; where it is offloaded it is DeepSpeed's CPU Adam, the same AdamW up to rounding.
    Stages 1 to 3 keep an fp32 master of the rank's partition also beside fp32 parameters: stage 3
    asks whether the two can be one by comparing a device with its name, which never agrees.
    """

    requires = ("deepspeed",)
    preload: ClassVar[tuple[str, ...]] = ("deepspeed.runtime.zero.muon.muon_optimizer", "cpuinfo")

    stage: Literal[0, 1, 2, 3] = 0
    """ZeRO stage."""
    offload_optimizer: Place = "none"
    """Where optimizer state, and the update, live: the device, the host (stages 1 to 3), or a
    folder (stage 3)."""
    offload_parameters: Place = "none"
    """Where partitioned parameters wait for their layer (stage 3)."""
    folder: str = ""
    """Folder, on any disk, in which `offload` holds what is offloaded to `nvme` until the next
    trial; empty for the trial's own."""
    bucket_elements: int | None = Field(default=None, gt=0)
    """Elements that are reduced, prefetched and held live at a time; by default an eighth of the
    model, at most 25 MiB."""
    persistent_elements: int = Field(default=PERSISTENT_ELEMENTS, ge=0)
    """Stage 3 leaves parameters of up to this size whole on every rank."""

    @classmethod
    def compiled(cls) -> dict[str, str]:
        return {
            f"DeepSpeed's {part}": missing(part) or "built" for part in ("cpu_adam", "async_io")
        }

    @property
    def shards_parameters(self) -> bool:
        return self.stage == 3

    def check(self, cell: Cell, workload: Workload) -> None:
        check_zero(
            cell,
            workload,
            self.stage,
            self.offload_optimizer,
            self.offload_parameters,
            self.folder or tempfile.gettempdir(),
        )
        facts = model_facts(workload, cell.sequence_length)
        memory.require_locked(
            cell, facts, self.config(cell, self.layout(cell.devices), facts.sizes, "")
        )

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        return HALF if cell.precision == "bf16" else EXACT

    def stand_in(self, cell: Cell) -> str | None:
        places = {"optimizer states": self.offload_optimizer, "parameters": self.offload_parameters}
        moved = " and ".join(what for what, place in places.items() if place == "cpu")
        return (
            f"no device to leave: {moved} are already in host memory"
            if moved and cell.device == "cpu"
            else None
        )

    def same_as_ddp(self, cell: Cell) -> str | None:
        return (
            "DeepSpeed stage 0" if self.stage == 0 and self.model_fields_set <= {"stage"} else None
        )

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        return memory.engine_states(cell, layout, facts, self.config(cell, layout, facts.sizes, ""))

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        return memory.engine_traffic(
            cell, layout, facts, self.config(cell, layout, facts.sizes, "")
        )

    def moved_bytes(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float:
        return memory.engine_moves(facts, self.offload_optimizer, self.offload_parameters)

    def config(
        self, cell: Cell, layout: Layout, sizes: Sequence[int], folder: Path | str
    ) -> dict[str, Any]:
        """DeepSpeed's config for the cell."""
        return deepspeed_config(
            cell,
            layout,
            self.stage,
            offload_optimizer=self.offload_optimizer,
            offload_parameters=self.offload_parameters,
            folder=folder,
            sizes=sizes,
            bucket_elements=self.bucket_elements,
            persistent_elements=self.persistent_elements,
        )

    def export(self, cell: Cell, to: str) -> Export | None:
        sizes = model_facts(make_workload(cell.workload), cell.sequence_length).sizes
        config = self.config(cell, self.layout(cell.devices), sizes, self.folder or "offload")
        more: dict[str, bool] = {
            "cpu_adam": self.offload_optimizer != "none" and cell.optimizer == "adamw",
            "undo_first_step": self.stage == 0 and cell.precision != "fp32",
            "keep_dtype": (
                self.offload_parameters == "nvme"
                and cell.device == "cpu"
                and cell.precision == "fp32"
            ),
        }
        if to == "accelerate":
            return accelerate_export(cell, deepspeed=config, about_deepspeed=more)
        file = {"ds_config.json": json.dumps(config, indent=2) + "\n"}
        return Export(
            "deepspeed.py.j2", {"autocast": False, **more}, file, deepspeed_variables(cell)
        )

    def register(self, job: Job, engine: Any, **more: Any) -> None:
        """Shows an engine to the harness, also one that another library made."""
        named = {
            "states": lambda: memory.held_by_engine(engine),
            "waits": memory.engine_waits(engine),
        }
        job.register(
            engine.module,
            engine.basic_optimizer,
            gather=lambda: self.whole(engine),
            **named,
            **more,
        )

    def setup(self, job: Job) -> TrainStep:
        settle(job.device.type, job.local_processes)
        import deepspeed
        import torch

        model = self.build(job)
        folder = self.emptied_folder(job)
        config = self.config(
            job.cell, job.layout, [p.numel() for p in model.parameters() if p.requires_grad], folder
        )
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=self.optimizer(job, model), config=config
        )
        self.undo_first_step(engine)
        self.register(
            job,
            engine,
            offload_folder=(
                folder if "nvme" in (self.offload_optimizer, self.offload_parameters) else None
            ),
        )
        plain, parts = own_precision(job), job.cell.micro_batches

        def step(batch: Batch) -> Tensor:
            total = torch.zeros((), device=job.device)
            for part in batch.split(parts):
                loss = plain.loss(engine, part)
                engine.backward(loss)
                engine.step()
                total += loss.detach() / parts
            return total

        return step

    def emptied_folder(self, job: Job) -> Path:
        """Where what is offloaded to a disk lies, without what an earlier trial left there."""
        import torch.distributed as dist

        folder = (Path(self.folder) if self.folder else job.scratch) / "offload"
        if self.folder and job.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        if self.folder:
            dist.barrier()
        return folder

    def build(self, job: Job) -> nn.Module:
        return job.model()

    def optimizer(self, job: Job, model: Any) -> Optimizer:
        """torch's; where states are offloaded DeepSpeed's AdamW on the CPU (decay decoupled, eps
        beside the corrected root)."""
        _, kwargs = job.optimizer_class()
        if self.offload_optimizer == "none" or job.cell.optimizer == "sgd":
            return job.optimizer(model.parameters())
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer: Optimizer = DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **kwargs)
        return optimizer

    def undo_first_step(self, engine: Any) -> None:
        """Without ZeRO, the optimizer of half weights takes a step with zero gradients when it is
        made.

        It decays the weights and counts in the bias correction of all later steps: loss off by 8e-3
        at the second.
        """
        if hasattr(engine.optimizer, "refresh_fp32_params") and self.stage == 0:
            engine.basic_optimizer.state.clear()
            engine.optimizer.refresh_fp32_params()

    def whole(self, engine: Any) -> Iterator[tuple[str, Tensor]]:
        """Parameters by name, whole; their fp32 masters where there are any."""
        return memory.full_parameters(engine)
