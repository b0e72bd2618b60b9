"""The batches of one rank: on a GPU prepared ahead of their step, in pinned memory, and copied
without waiting."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from harness.spec.training import Batch
from harness.workloads import DataSource

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Batches:
    """A rank's rows of each global batch, on its device.

    On a CPU a batch is made when it is asked for. For a GPU a thread makes the next one while the
    step of this one runs, as a DataLoader's worker does: drawing the pixels of 32 images of 224 x
    224 takes a core some 60 ms, a step less.
    """

    def __init__(
        self, data: DataSource, seed: int, global_batch: int, rows: slice, device: torch.device
    ) -> None:
        self.data, self.seed, self.global_batch, self.rows, self.device = (
            data,
            seed,
            global_batch,
            rows,
            device,
        )
        self._next: tuple[int, Future[tuple[Tensor, Tensor]]] | None = None
        self._pool: ThreadPoolExecutor | None = None
        if device.type == "cuda":
            # Pinning makes a context on the thread's current GPU, which for a new thread is the
            # first one.
            import torch

            self._pool = ThreadPoolExecutor(
                1, "batches", initializer=torch.cuda.set_device, initargs=(device,)
            )

    def fetch(self, step: int, number: int | None = None) -> Batch:
        """The batch of a step of the training, on the device; a copy to a GPU may still be under
        way, in the order of its stream.

        `number`: the step's as the strategy is told it, where some steps are trained again.
        """
        shown = step if number is None else number
        if self._pool is None:
            inputs, labels = self._tensors(step)
            return Batch(shown, inputs.to(self.device), labels.to(self.device))
        if self._next is None or self._next[0] != step:
            self._next = step, self._pool.submit(self._pinned, step)
        inputs, labels = self._next[1].result()
        self._next = step + 1, self._pool.submit(self._pinned, step + 1)
        return Batch(
            shown,
            inputs.to(self.device, non_blocking=True),
            labels.to(self.device, non_blocking=True),
        )

    def close(self) -> None:
        """Ends the thread; a rank need not, which leaves with its process."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _tensors(self, step: int) -> tuple[Tensor, Tensor]:
        import torch

        inputs, labels = self.data.batch(self.seed, step, self.global_batch, self.rows)
        return torch.from_numpy(inputs), torch.from_numpy(labels)

    def _pinned(self, step: int) -> tuple[Tensor, Tensor]:
        inputs, labels = self._tensors(step)
        return inputs.pin_memory(), labels.pin_memory()
