"""transformers' Trainer: its own training loop around DDP, DeepSpeed's ZeRO or FSDP2."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal

from harness.spec.cell import Cell
from harness.spec.errors import Refused
from harness.spec.training import Batch, Layout, States, Tolerance, TrainStep
from harness.strategies._accelerate import pretend_gpus, verify
from harness.strategies._accelerate_config import fsdp2_settings
from harness.strategies._ddp import ddp_buckets
from harness.strategies._deepspeed import settle
from harness.strategies.accelerate import Accelerate
from harness.strategy.base import Strategy
from harness.strategy.job import Job

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.strategies._trainer import Stepped, SteppedTrainer
    from harness.workloads import Workload
    from harness.workloads.counts import ModelFacts


class TransformersTrainer(Strategy):
    """transformers' Trainer, by its own loop, around DDP, DeepSpeed's ZeRO-2 or ZeRO-3, or FSDP2.

    Left alone it trains something else than a plain script: it shuffles, clips the gradient's norm
    at 1.0, lets the learning rate fall, exempts norms and biases from weight decay and has DDP look
    for unused parameters. All that is set right, and the order in which its data loader reads
    samples is checked at every step. The loss is the model's own, on Trainer's default path. Causal
    models shift labels, and these are shifted already: they are given as `shift_labels` too, which
    are taken as they are and all counted. (Of unshifted labels Trainer counts the first, which
    nothing predicts, where transformers does not know the model's loss by its class's name, GPT-2's
    for one.) Other models may ignore the count: Trainer then multiplies their mean by the number of
    ranks and does not divide it by that of micro-batches, so it is told that they do not take it.
    Nothing is logged, saved or evaluated. The gradient's norm is still computed in every step, and
    the loss looked at for NaN: that is what Trainer costs.
    """

    requires = ("accelerate",)
    preload = (
        "transformers.trainer",
        "deepspeed",
    )  # Accelerate imports the second wherever it is installed

    engine: Literal["ddp", "zero2", "zero3", "fsdp2"] = "ddp"
    """What it wraps, through Accelerate: DDP, DeepSpeed's ZeRO stage 2 or 3, or FSDP2."""

    @property
    def beneath(self) -> Accelerate:
        """The same without Trainer."""
        return Accelerate(engine=self.engine)

    @property
    def shards_parameters(self) -> bool:
        return self.beneath.shards_parameters

    def check(self, cell: Cell, workload: Workload) -> None:
        self.beneath.check(cell, workload)
        if prompts := {"prompt", "p_tuning", "p_tuning_lstm"} & set(workload.suffixes):
            raise Refused(
                f"Trainer has the model make its loss, and peft's with {prompts.pop()} takes"
                " unshifted labels only; use ddp"
            )

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        return self.beneath.tolerance(cell, workload)

    def stand_in(self, cell: Cell) -> str | None:
        return self.beneath.stand_in(cell)

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States | None:
        return self.beneath.states(cell, layout, facts)

    def same_as_ddp(self, cell: Cell) -> str | None:
        return "transformers Trainer" if self.engine == "ddp" else None

    def setup(self, job: Job) -> TrainStep:
        from harness.strategies._trainer import Stepped

        made: list[SteppedTrainer] = []

        def script(stepped: Stepped) -> None:
            made.append(self.trainer(stepped))
            made[0].train()

        stepped = Stepped(job, script)
        stepped.begin()
        self.register(job, made[0])
        return stepped.step

    def trainer(self, stepped: Stepped) -> SteppedTrainer:
        """The Trainer, not yet training."""
        job = stepped.job
        if self.beneath.zero:
            settle(job.device.type, job.local_processes)
        import torch
        from transformers import TrainingArguments

        from harness.strategies._trainer import SteppedTrainer

        model = (
            job.model()
        )  # before the arguments, which may tell transformers to build models in ZeRO-3's shards
        args = TrainingArguments(**self.arguments(job, model))
        torch.set_num_threads(
            job.threads
        )  # Accelerate takes all cores where OMP_NUM_THREADS is unset
        if self.engine == "fsdp2" and job.device.type == "cpu":
            pretend_gpus()
        trainer = SteppedTrainer(
            stepped, model, args, functools.partial(self.named, job.workload, model)
        )
        trainer.model_accepts_loss_kwargs = self.counts_labels(job.workload)
        verify(job, trainer.accelerator, self.engine == "fsdp2", bool(self.beneath.zero))
        return trainer

    def register(self, job: Job, trainer: SteppedTrainer) -> None:
        wrapped: Any = trainer.model_wrapped
        optimizer: Any = trainer.optimizer
        if zero := self.beneath.zero:
            zero.register(job, wrapped)
        else:
            ddp = hasattr(wrapped, "reducer")  # a single rank's model is not wrapped
            job.register(
                wrapped, optimizer, library=functools.partial(ddp_buckets, wrapped) if ddp else None
            )

    def arguments(self, job: Job, model: nn.Module) -> dict[str, Any]:
        """Trainer's arguments that train what the cell says, and nothing beside it."""
        cell = job.cell
        same_training = {
            "seed": cell.seed,
            "max_steps": cell.total_steps + 1,
            "per_device_train_batch_size": (
                cell.global_batch // job.layout.data // cell.micro_batches
            ),
            "gradient_accumulation_steps": cell.micro_batches,
            "train_sampling_strategy": "sequential",
            "max_grad_norm": 0.0,
            "lr_scheduler_type": "constant",
            "ddp_find_unused_parameters": False,
            "bf16": cell.precision == "bf16",
            "fp16": cell.precision == "fp16",
        }
        nothing_beside = {
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "log_level": "error",
        }
        args: dict[str, Any] = {
            "output_dir": str(job.scratch / "trainer"),
            "use_cpu": job.device.type == "cpu",
        }
        if zero := self.beneath.zero:
            sizes = [p.numel() for p in model.parameters() if p.requires_grad]
            args["deepspeed"] = zero.config(cell, job.layout, sizes, "")
        if self.engine == "fsdp2":
            settings = fsdp2_settings(job.workload)
            classes = settings.pop("transformer_cls_names_to_wrap", None)
            args |= {
                "fsdp": True,
                "fsdp_config": {**settings, "transformer_layer_cls_to_wrap": classes},
            }
        return args | same_training | nothing_beside

    def counts_labels(self, workload: Workload) -> bool:
        """Whether the model divides its loss by the number of labels that Trainer counts over
        micro-batches and ranks."""
        return workload.kind == "causal"

    def named(self, workload: Workload, model: Any, part: Batch) -> dict[str, Tensor]:
        """What the model's forward is given, by name."""
        shifted = {"shift_labels": part.labels} if workload.kind == "causal" else {}
        return {model.main_input_name: part.inputs, "labels": part.labels, **shifted}
