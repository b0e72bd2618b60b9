"""transformers' Trainer with the batches of the harness, its loop turned into steps."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from accelerate.utils import GradScalerKwargs
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from harness.strategies._accelerate import pretend_gpus, verify
from harness.strategies._accelerate_config import fsdp2_settings
from harness.strategies._accelerate_engine import AccelerateEngine
from harness.strategies._deepspeed import settle
from harness.strategy import Batch, Job, Workload
from harness.strategy.step import LOSS_SCALE
from harness.workloads.recompute import checkpoint_arguments

Inputs = dict[str, Tensor]


class Stepped:
    """A script that owns its training loop, in a thread of its own that is stopped before each
    step.

    Two hand-overs a step: the batch to the script, which asks for it with `next_batch`, and the
    loss back. A step begins with the script's wait for a batch and ends where it waits for the
    next, so all that the loop does is in it. The script builds the model too: glibc keeps what a
    thread has freed for that thread.
    """

    trainer: SteppedTrainer

    def __init__(self, job: Job, engine: AccelerateEngine) -> None:
        self.job, self.engine = job, engine
        self._batches: SimpleQueue[Batch] = SimpleQueue()
        self._answers: SimpleQueue[Tensor | BaseException | None] = SimpleQueue()

    def begin(self) -> SteppedTrainer:
        """Starts the script; returns its Trainer when it asks for its first batch.

        What it raises is raised here, and in `step`.
        """
        threading.Thread(target=self._run, name="training loop", daemon=True).start()
        self._answer()
        return self.trainer

    def step(self, batch: Batch) -> Tensor | None:
        """Lets the loop go on by one step; what it hands over when it asks for the next batch."""
        self._batches.put(batch)
        return self._answer()

    def next_batch(self, loss: Tensor | None) -> Batch:
        """Called by the script: hands over the loss of the step that it has done, and waits for the
        batch of the next."""
        self._answers.put(loss)
        return self._batches.get()

    def _answer(self) -> Tensor | None:
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _run(self) -> None:
        try:
            # OpenMP's number of threads and the device are each thread's own.
            torch.set_num_threads(self.job.threads)
            if self.job.device.type == "cuda":
                torch.cuda.set_device(self.job.device)
            self.trainer = make_trainer(self, self.engine)
            self.trainer.train()
            raise RuntimeError("the training loop has ended before the harness's steps were done")
        except BaseException as error:
            self._answers.put(error)


class SteppedTrainer(Trainer):
    """Trainer's own loop, data loader, loss, gradient accumulation and update.

    Its data set is the numbers of the samples, so that the loader shows in which order it would
    read a real one; they are exchanged for the harness's samples behind the loader.
    """

    def __init__(
        self,
        stepped: Stepped,
        model: nn.Module,
        args: TrainingArguments,
    ) -> None:
        self.stepped, self.job = stepped, stepped.job
        self.inputs = functools.partial(named_inputs, self.job.workload, model)
        self.loss = torch.zeros((), device=self.job.device)
        # A step more: the loader reads one batch ahead.
        samples: Any = range(self.job.cell.global_batch * (args.max_steps + 1))
        collate: Any = list
        super().__init__(model, args, data_collator=collate, train_dataset=samples)

    def get_batch_samples(
        self, epoch_iterator: Iterator[list[int]], num_batches: int, device: torch.device
    ) -> Any:
        """Called at the beginning of each step."""
        batch = self.stepped.next_batch(self.loss)
        self.loss = torch.zeros_like(self.loss)
        parts = map(self._exchange, epoch_iterator, batch.split(num_batches), range(num_batches))
        return super().get_batch_samples(parts, num_batches, device)

    def _exchange(self, numbers: list[int], part: Batch, index: int) -> Inputs:
        """The part by the names of the model's inputs, if the numbers are the next: each rank in
        turn takes a micro-batch."""
        size = len(part.inputs)
        first = (
            (part.step * self.job.cell.micro_batches + index) * self.job.layout.data + self.job.rank
        ) * size
        if numbers != list(range(first, first + size)):
            raise RuntimeError(
                f"Trainer reads samples {numbers}, not {size} from {first} on: another data order"
            )
        return self.inputs(part)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        self.loss += loss
        return loss

    def create_optimizer(self, model: Any = None) -> Any:
        """The cell's optimizer: Trainer's own exempts norms and biases from weight decay."""
        if self.optimizer is None:
            whole: Any = self.model if model is None else model
            self.optimizer = self.job.optimizer(whole.parameters())
        return self.optimizer

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        args: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        args["kwargs_handlers"].append(GradScalerKwargs(init_scale=LOSS_SCALE))
        return args


def make_trainer(stepped: Stepped, engine: AccelerateEngine) -> SteppedTrainer:
    """The Trainer around this engine, not yet training."""
    job = stepped.job
    if engine.zero:
        settle(job.device.type, job.local_processes)
    # The model comes before the arguments, which may tell transformers to build models in ZeRO-3's
    # shards.
    model = job.model(recompute_by_arguments)
    args = TrainingArguments(**arguments(job, model, engine))
    torch.set_num_threads(job.threads)  # Accelerate takes all cores where OMP_NUM_THREADS is unset
    sharded = engine.engine == "fsdp2"
    if sharded and job.device.type == "cpu":
        pretend_gpus()
    trainer = SteppedTrainer(stepped, model, args)
    trainer.model_accepts_loss_kwargs = counts_labels(job.workload)
    verify(job, trainer.accelerator, sharded, bool(engine.zero))
    return trainer


def arguments(job: Job, model: nn.Module, engine: AccelerateEngine) -> dict[str, Any]:
    """Trainer's arguments that train what the cell says, and nothing beside it."""
    cell = job.cell
    same_training = {
        "seed": cell.seed,
        "max_steps": cell.total_steps + 1,
        "per_device_train_batch_size": (cell.global_batch // job.layout.data // cell.micro_batches),
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
    if zero := engine.zero:
        sizes = [p.numel() for p in model.parameters() if p.requires_grad]
        args["deepspeed"] = zero.config(cell, job.layout, sizes)
    if engine.engine == "fsdp2":
        settings = fsdp2_settings(job.workload)
        classes = settings.pop("transformer_cls_names_to_wrap", None)
        args |= {
            "fsdp": True,
            "fsdp_config": {**settings, "transformer_layer_cls_to_wrap": classes},
        }
    if cell.recompute != "none":
        args |= {
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": checkpoint_arguments(cell.recompute),
        }
    return args | same_training | nothing_beside


def recompute_by_arguments(model: nn.Module, blocks: Sequence[nn.Module], recompute: str) -> None:
    """Leaves the blocks as they are: Trainer enables transformers' own activation checkpointing
    where its arguments say so."""


def counts_labels(workload: Workload) -> bool:
    """Whether the model divides its loss by the number of labels that Trainer counts over
    micro-batches and ranks.

    Others may ignore the count: Trainer then multiplies their mean by the number of ranks and does
    not divide it by that of micro-batches, so it is told that they do not take it.
    """
    return workload.kind == "causal"


def named_inputs(workload: Workload, model: nn.Module, part: Batch) -> Inputs:
    """What the model's forward is given, by name.

    Causal models shift labels, and these are shifted already: they are given as `shift_labels` too,
    which are taken as they are and all counted. (Of unshifted labels Trainer counts the first,
    which nothing predicts, where transformers does not know the model's loss by its class's name,
    GPT-2's for one.)
    """
    shifted = {"shift_labels": part.labels} if workload.kind == "causal" else {}
    return {str(model.main_input_name): part.inputs, "labels": part.labels, **shifted}
