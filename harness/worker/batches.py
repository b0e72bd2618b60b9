"""Batches of one rank."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from harness.spec.training import Batch
from harness.workloads import DataSource

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IGNORED = -100
"""Label of a token without one, as in torch and transformers."""


class Batches:
    """A rank's rows of each global batch, on its device.

    On a CPU, batches are created on request. For a GPU, a thread prepares the next one during a
    step: drawing 32 images of 224 x 224 pixels takes a core about 60 ms, longer than a step.
    """

    def __init__(
        self,
        data: DataSource,
        seed: int,
        global_batch: int,
        rows: slice,
        device: torch.device,
        padded: bool = False,
    ) -> None:
        self.data, self.seed, self.global_batch, self.rows, self.device = (
            data,
            seed,
            global_batch,
            rows,
            device,
        )
        self.padded = padded
        """Whether only a random number of each sample's first tokens have labels."""
        self._next: tuple[int, Future[tuple[Tensor, Tensor]]] | None = None
        self._pool: ThreadPoolExecutor | None = None
        if device.type == "cuda":
            # Pinning creates a context on the thread's current GPU, by default the first.
            import torch

            self._pool = ThreadPoolExecutor(
                1, "batches", initializer=torch.cuda.set_device, initargs=(device,)
            )

    def fetch(self, step: int, number: int | None = None) -> Batch:
        """Returns a training step's batch; its copy to a GPU may still be running on its stream.

        `number`: the step number given to the strategy, if it differs because of a rewind.
        """
        shown = step if number is None else number
        if self._pool is None:
            inputs, labels = self._tensors(step)
            return Batch(
                shown, inputs.to(self.device), labels.to(self.device), self._label_tokens(step)
            )
        if self._next is None or self._next[0] != step:
            self._next = step, self._pool.submit(self._pinned, step)
        inputs, labels = self._next[1].result()
        self._next = step + 1, self._pool.submit(self._pinned, step + 1)
        return Batch(
            shown,
            inputs.to(self.device, non_blocking=True),
            labels.to(self.device, non_blocking=True),
            self._label_tokens(step),
        )

    def close(self) -> None:
        """Ends the thread; optional in a rank, whose exit ends it."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _tensors(self, step: int) -> tuple[Tensor, Tensor]:
        import torch

        inputs, labels = self.data.batch(self.seed, step, self.global_batch, self.rows)
        if self.padded:
            lengths = self.data.lengths(self.seed, step, self.global_batch)[self.rows]
            padding = np.arange(labels.shape[1]) >= lengths[:, None]
            inputs, labels = np.where(padding, 0, inputs), np.where(padding, IGNORED, labels)
        return torch.from_numpy(inputs), torch.from_numpy(labels)

    def _label_tokens(self, step: int) -> float | None:
        """Returns the mean number of label tokens over all ranks' shares; see `Batch`."""
        if not self.padded:
            return None
        lengths = self.data.lengths(self.seed, step, self.global_batch)
        samples: int = self.rows.stop - self.rows.start
        return float(lengths.sum()) * samples / self.global_batch

    def _pinned(self, step: int) -> tuple[Tensor, Tensor]:
        inputs, labels = self._tensors(step)
        return inputs.pin_memory(), labels.pin_memory()
