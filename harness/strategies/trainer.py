from __future__ import annotations

from typing import Any

from harness.cell.errors import Refused
from harness.cell.training import TrainStep
from harness.seam import Capabilities, Cell, Export, Job
from harness.strategies._accelerate import AccelerateEngine
from harness.strategies._accelerate_config import deepspeed_parts
from harness.strategies.ddp import ddp_buckets
from harness.workloads import Workload
from harness.workloads.family import HAS_DECODER


class TransformersTrainer(AccelerateEngine):
    """transformers' Trainer, with its own loop, around DDP, DeepSpeed ZeRO-2 or ZeRO-3, or FSDP2.

    Disables its shuffling, clipping at 1.0, learning-rate decay, exemptions from weight decay, and
    DDP's search for unused parameters. Its gradient norm and NaN check remain on, and are timed.
    """

    # Accelerate imports deepspeed wherever it is installed.
    capabilities = Capabilities(
        preload=("transformers.trainer", "deepspeed"),
        # Trainer needs `max_steps`.
        fixed_steps=True,
        reshards=False,
    )

    def check(self, cell: Cell, workload: Workload) -> None:
        super().check(cell, workload)
        if prompts := {"prompt", "p_tuning", "p_tuning_lstm"} & set(workload.suffixes):
            raise Refused(
                f"Trainer lets the model compute its loss, and peft's {prompts.pop()} takes"
                " unshifted labels only; use ddp"
            )
        if workload.kind == "custom":
            raise Refused(
                f"Trainer lets the model compute its loss, and {workload.name} computes it outside;"
                " use ddp"
            )
        if workload.kind in HAS_DECODER:
            raise Refused(
                f"Trainer would let {workload.name} make its decoder's inputs from the labels,"
                " but samples have their own; use ddp"
            )

    def ddp_equivalent_of(self, cell: Cell) -> str | None:
        return "transformers Trainer" if self.engine == "ddp" else None

    def export(self, cell: Cell, to: str) -> Export | None:
        if to not in ("torchrun", "slurm"):
            return None
        if stand_in := self.stand_in(cell):
            raise Refused(f"this device only has a stand-in for it: {stand_in}")
        fsdp, zero = self.fsdp2_settings(cell) or {}, self.deepspeed_config(cell)
        if "transformer_cls_names_to_wrap" in fsdp:
            fsdp["transformer_layer_cls_to_wrap"] = fsdp.pop("transformer_cls_names_to_wrap")
        values = {"zero": bool(zero), "fsdp": fsdp}
        if zero is None:
            return Export("trainer.py.j2", values)
        parts = deepspeed_parts(cell, zero)
        return Export("trainer.py.j2", values, **parts, needs=("deepspeed",))

    def setup(self, job: Job) -> TrainStep:
        from harness.strategies import _trainer

        stepped = _trainer.Stepped(job, self)
        trainer = stepped.begin()
        wrapped: Any = trainer.model_wrapped
        optimizer: Any = trainer.optimizer
        if self.zero:
            self.zero.register(job, wrapped)
        else:
            job.register(wrapped, optimizer).library = lambda: ddp_buckets(wrapped)
        job.save_by(stepped.save, stepped.loaded, loads_in_setup=True)
        return stepped.step
