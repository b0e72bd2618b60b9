"""A library that owns its training loop, turned into steps: its script runs in a thread that is stopped before each step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

from harness.strategy import Batch, Job

if TYPE_CHECKING:
    from torch import Tensor


class Stepped:
    """Two hand-overs a step: the batch to the script, which asks with `next_batch`, and the loss back.

    A step begins with the script's wait for a batch and ends where it waits for the next, so all that the loop does is in it.
    The model is best built by the script too: what one thread has freed, glibc does not give to another.
    """

    def __init__(self, job: Job, script: Callable[[Stepped], None]) -> None:
        self.job, self.script = job, script
        self._batches: SimpleQueue[Batch] = SimpleQueue()
        self._answers: SimpleQueue[Tensor | BaseException | None] = SimpleQueue()

    def begin(self) -> None:
        """Starts the script; returns when it asks for its first batch. What it raises is raised here, and in `step`."""
        threading.Thread(target=self._run, name="training loop", daemon=True).start()
        self._answer()

    def step(self, batch: Batch) -> Tensor | None:
        """Lets the loop go on by one step; what it hands over when it asks for the next batch."""
        self._batches.put(batch)
        return self._answer()

    def next_batch(self, loss: Tensor | None) -> Batch:
        """Called by the script: hands over the loss of the step that it has done, and waits for the batch of the next."""
        self._answers.put(loss)
        return self._batches.get()

    def _answer(self) -> Tensor | None:
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _run(self) -> None:
        import torch

        try:
            torch.set_num_threads(self.job.cell.threads_per_device)  # what OpenMP is told, and the device, are each thread's own
            if self.job.device.type == "cuda":
                torch.cuda.set_device(self.job.device)
            self.script(self)
            raise RuntimeError("the training loop has ended before the harness's steps were done")
        except BaseException as error:
            self._answers.put(error)
