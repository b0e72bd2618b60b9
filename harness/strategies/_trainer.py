"""Runs transformers' Trainer one step at a time, on the harness's batches."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from accelerate.utils import GradScalerKwargs
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from harness.cell.training import Batch
from harness.seam import Job
from harness.seam.job import LOSS_SCALE, ROUTER_WEIGHT
from harness.seam.recipe import whole
from harness.strategies._accelerate import (
    AccelerateEngine,
    pretend_gpus,
    recompute_elsewhere,
    verify,
)
from harness.strategies._accelerate_config import fsdp2_settings, state_dict_type
from harness.strategies._deepspeed import settle
from harness.workloads import Workload
from harness.workloads.low_precision import store_as_floats
from harness.workloads.recompute import checkpoint_arguments

Inputs = dict[str, Tensor]
KEYS = "dropout_keys"
"""Key of dropout keys among the inputs, removed before the model runs."""


class Stepped:
    """A script with its own training loop, in a thread that pauses before each step.

    A step lasts from one request for a batch (`next_batch`) to the next, which includes all of the
    loop's work. The thread also builds the model, because glibc keeps the memory that a thread
    frees for that thread.
    """

    trainer: SteppedTrainer

    def __init__(self, job: Job, engine: AccelerateEngine) -> None:
        self.job, self.engine = job, engine
        self._batches: SimpleQueue[Batch] = SimpleQueue()
        self._answers: SimpleQueue[Tensor | BaseException | None] = SimpleQueue()

    def begin(self) -> SteppedTrainer:
        """Starts the script; returns its Trainer at its first request for a batch."""
        threading.Thread(target=self._run, name="training loop", daemon=True).start()
        self._answer()
        return self.trainer

    def save(self, folder: Path, step: int) -> None:
        """Saves as the loop would."""
        self.trainer.args.output_dir = str(folder)
        assert self.trainer.model is not None
        self.trainer._save_checkpoint(self.trainer.model, trial=None)

    def loaded(self, folder: Path) -> int:
        """Returns the step at which the loop resumed in `begin`."""
        step: int = self.trainer.state.global_step
        return step

    def step(self, batch: Batch) -> Tensor | None:
        self._batches.put(batch)
        return self._answer()

    def next_batch(self, loss: Tensor | None) -> Batch:
        """Passes on the finished step's loss and waits for a batch."""
        self._answers.put(loss)
        return self._batches.get()

    def _answer(self) -> Tensor | None:
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _run(self) -> None:
        try:
            # The OpenMP thread count and the device are per thread.
            torch.set_num_threads(self.job.threads)
            if self.job.device.type == "cuda":
                torch.cuda.set_device(self.job.device)
            self.trainer = make_trainer(self, self.engine)
            resume_from = self.job.resume_from
            where = str(checkpoint_in(resume_from)) if resume_from else None
            self.trainer.train(resume_from_checkpoint=where)
            raise RuntimeError("the training loop ended before the harness's steps were done")
        except BaseException as error:
            self._answers.put(error)


class SteppedTrainer(Trainer):
    """Trainer's own loop, data loader, loss, gradient accumulation and update.

    Its data set is sample numbers, which reveal the loader's order; `_exchange` replaces them by
    samples.
    """

    def __init__(self, stepped: Stepped, model: nn.Module, args: TrainingArguments) -> None:
        self.stepped, self.job = stepped, stepped.job
        self.inputs = functools.partial(named_inputs, self.job.workload, model)
        self.loss = torch.zeros((), device=self.job.device)
        # One extra step, because the loader reads a batch ahead.
        samples: Any = range(self.job.cell.global_batch * (args.max_steps + 1))
        collate: Any = list
        super().__init__(model, args, data_collator=collate, train_dataset=samples)

    def get_batch_samples(
        self, epoch_iterator: Iterator[list[int]], num_batches: int, device: torch.device
    ) -> Any:
        """Requests the next batch; called first in each step."""
        batch = self.stepped.next_batch(self.loss)
        self.loss = torch.zeros_like(self.loss)
        parts = map(self._exchange, epoch_iterator, batch.split(num_batches), range(num_batches))
        return super().get_batch_samples(parts, num_batches, device)

    def _exchange(self, numbers: list[int], part: Batch, index: int) -> Inputs:
        """Replaces the loader's sample numbers by the harness's micro-batch; returns model inputs.

        Raises RuntimeError unless the numbers are the next of this rank. Ranks take micro-batches
        in turn.
        """
        size = len(part.inputs)
        first = (
            (part.step * self.job.cell.micro_batches + index) * self.job.layout.data + self.job.rank
        ) * size
        if numbers != list(range(first, first + size)):
            raise RuntimeError(
                f"Trainer reads samples {numbers}, not {size} from {first} on: another data order"
            )
        inputs = self.inputs(part)
        return inputs if part.keys is None else {**inputs, KEYS: part.keys}

    def _prepare_inputs(self, inputs: Inputs) -> Inputs:
        prepared: Inputs = super()._prepare_inputs(inputs)
        self.job.recipe.masks.keys = prepared.pop(KEYS, None)
        return prepared

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        self.loss += loss
        return loss

    def create_optimizer(self, model: Any = None) -> Any:
        """Returns the cell's optimizer; Trainer's exempts norms and biases from weight decay."""
        if self.optimizer is None:
            whole: Any = self.model if model is None else model
            self.optimizer = self.job.optimizer(whole.parameters())
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> LRScheduler:
        if self.lr_scheduler is None:
            self.lr_scheduler = self.job.scheduler(optimizer or self.create_optimizer())
        created: LRScheduler = super().create_scheduler(num_training_steps, optimizer)
        return created

    def keep_norms(self) -> None:
        clip = self.accelerator.clip_grad_norm_

        def clip_and_keep(*arguments: object, **named: object) -> Tensor:
            norm: Tensor = clip(*arguments, **named)
            self.job.recipe.gradient_norm = whole(norm)
            return norm

        if self.job.cell.clip_norm is not None:
            self.accelerator.clip_grad_norm_ = clip_and_keep

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        args: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        args["kwargs_handlers"].append(GradScalerKwargs(init_scale=LOSS_SCALE))
        return args


def make_trainer(stepped: Stepped, engine: AccelerateEngine) -> SteppedTrainer:
    job = stepped.job
    if engine.zero:
        settle(job.device.type, job.local_processes)
    # Build the model first: the arguments may make transformers build models in ZeRO-3 shards.
    model = job.model(recompute_elsewhere)
    if engine.engine == "fsdp2":
        store_as_floats(model, job.dtype())
    scale_balance(job, model)
    args = TrainingArguments(**arguments(job, model, engine))
    # Accelerate uses all cores if OMP_NUM_THREADS is not set.
    torch.set_num_threads(job.threads)
    sharded = engine.engine == "fsdp2"
    if sharded and job.device.type == "cpu":
        pretend_gpus()
    trainer = SteppedTrainer(stepped, model, args)
    trainer.model_accepts_loss_kwargs = counts_labels(job.workload)
    trainer.keep_norms()
    verify(job, trainer.accelerator, sharded, bool(engine.zero))
    return trainer


def checkpoint_in(folder: Path) -> Path:
    """Returns the subfolder that Trainer made in this folder."""
    (found,) = folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    return found


def arguments(job: Job, model: nn.Module, engine: AccelerateEngine) -> dict[str, Any]:
    cell = job.cell
    same_training = {
        "seed": cell.seed,
        "max_steps": cell.total_steps + 1,
        "per_device_train_batch_size": (cell.global_batch // job.layout.data // cell.micro_batches),
        "gradient_accumulation_steps": cell.micro_batches,
        "train_sampling_strategy": "sequential",
        "max_grad_norm": cell.clip_norm or 0.0,
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
        settings = fsdp2_settings(job.workload) | state_dict_type(cell)
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


def scale_balance(job: Job, model: nn.Module) -> None:
    """Divides the balancing loss by the numbers of ranks and micro-batches, in place. transformers
    5.23 would add it once for each of them."""
    if job.cell.balance_weight:
        parts = job.layout.data * job.cell.micro_batches
        setattr(model, ROUTER_WEIGHT, job.cell.balance_weight / parts)


def counts_labels(workload: Workload) -> bool:
    """Returns whether the model divides its loss by Trainer's label count.

    If it does not, Trainer must be told. Otherwise it would multiply the mean by the number of
    ranks and not divide it by the number of micro-batches.
    """
    return workload.kind == "causal"


def named_inputs(workload: Workload, model: nn.Module, part: Batch) -> Inputs:
    """Returns the inputs of the model's forward by name.

    Labels are already shifted, so causal models also get them as `shift_labels`. If transformers
    does not recognise the loss by class name, as for GPT-2, Trainer would count the first unshifted
    label, which nothing predicts.
    """
    further = {"shift_labels": part.labels} if workload.kind == "causal" else {}
    if part.positions is not None:
        further["position_ids"] = part.positions
    return {str(model.main_input_name): part.inputs, "labels": part.labels, **further}
