"""transformers' Trainer with the batches of the harness."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils import GradScalerKwargs
from torch import Tensor
from transformers import Trainer, TrainingArguments

from harness.stepped import Stepped
from harness.strategy import Batch
from harness.training import LOSS_SCALE

Inputs = dict[str, Tensor]


class SteppedTrainer(Trainer):
    """Trainer's own loop, data loader, loss, gradient accumulation and update.

    Its data set is the numbers of the samples, so that the loader shows in which order it would read a real one; they are
    exchanged for the harness's samples behind the loader.
    """

    def __init__(self, stepped: Stepped, model: Any, args: TrainingArguments, named: Callable[[Batch], Inputs]) -> None:
        self.stepped, self.job, self.named = stepped, stepped.job, named
        self.loss = torch.zeros((), device=self.job.device)
        samples: Any = range(self.job.cell.global_batch * (args.max_steps + 1))  # a step more: the loader reads one batch ahead
        collate: Any = list
        super().__init__(model, args, data_collator=collate, train_dataset=samples)

    def get_batch_samples(self, epoch_iterator: Iterator[list[int]], num_batches: int, device: torch.device) -> Any:
        """Called at the beginning of each step."""
        batch = self.stepped.next_batch(self.loss)
        self.loss = torch.zeros_like(self.loss)
        parts = map(self._exchange, epoch_iterator, batch.split(num_batches), range(num_batches))
        return super().get_batch_samples(parts, num_batches, device)

    def _exchange(self, numbers: list[int], part: Batch, index: int) -> Inputs:
        """The part by the names of the model's inputs, if the numbers are the next: each rank in turn takes a micro-batch."""
        size = len(part.inputs)
        first = ((part.step * self.job.cell.micro_batches + index) * self.job.layout.data + self.job.rank) * size
        if numbers != list(range(first, first + size)):
            raise RuntimeError(f"Trainer reads samples {numbers}, not {size} from {first} on: another data order")
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
