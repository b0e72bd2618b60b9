"""transformers' Trainer with the batches of the harness, its loop turned into steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import torch
from accelerate.utils import GradScalerKwargs
from torch import Tensor
from transformers import Trainer, TrainingArguments

from harness.spec.training import Batch
from harness.strategy.job import Job
from harness.strategy.step import LOSS_SCALE

Inputs = dict[str, Tensor]


class Stepped:
    """A script that owns its training loop, in a thread of its own that is stopped before each
    step.

    Two hand-overs a step: the batch to the script, which asks for it with `next_batch`, and the
    loss back. A step begins with the script's wait for a batch and ends where it waits for the
    next, so all that the loop does is in it. The script builds the model too: glibc keeps what a
    thread has freed for that thread.
    """

    def __init__(self, job: Job, script: Callable[[Stepped], None]) -> None:
        self.job, self.script = job, script
        self._batches: SimpleQueue[Batch] = SimpleQueue()
        self._answers: SimpleQueue[Tensor | BaseException | None] = SimpleQueue()

    def begin(self) -> None:
        """Starts the script; returns when it asks for its first batch.

        What it raises is raised here, and in `step`.
        """
        threading.Thread(target=self._run, name="training loop", daemon=True).start()
        self._answer()

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
            torch.set_num_threads(
                self.job.threads
            )  # what OpenMP is told, and the device, are each thread's own
            if self.job.device.type == "cuda":
                torch.cuda.set_device(self.job.device)
            self.script(self)
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
        model: Any,
        args: TrainingArguments,
        named: Callable[[Batch], Inputs],
    ) -> None:
        self.stepped, self.job, self.named = stepped, stepped.job, named
        self.loss = torch.zeros((), device=self.job.device)
        samples: Any = range(
            self.job.cell.global_batch * (args.max_steps + 1)
        )  # a step more: the loader reads one batch ahead
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
        return self.named(part)

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
