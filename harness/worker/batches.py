from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harness.cell.cell import Cell
from harness.cell.training import Batch, of_each_tensor
from harness.workloads import DataSource

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

IGNORED = -100
"""Label of a token that has none, as in torch and transformers."""
Tensors = dict[str, "Tensor"]


@dataclass(frozen=True)
class BatchRecipe:
    """Optional features of a rank's batches."""

    padded: bool = False
    """Whether only a prefix of random length has labels in each sample."""
    packed: bool = False
    """Whether each sample holds several documents."""
    dropout: bool = False
    """Whether each token has a key for its dropout masks."""

    @classmethod
    def of(cls, cell: Cell) -> BatchRecipe:
        return cls(cell.labels == "padded", cell.documents == "packed", cell.dropout > 0)

    @property
    def some_labels(self) -> bool:
        """Whether some tokens have no label."""
        return self.padded or self.packed


PLAIN = BatchRecipe()


class Batches:
    """This rank's rows of each global batch, on its device.

    For GPUs, a thread prepares the next batch, since drawing images can outlast a step.
    """

    def __init__(
        self,
        data: DataSource,
        seed: int,
        global_batch: int,
        rows: slice,
        device: torch.device,
        recipe: BatchRecipe = PLAIN,
    ) -> None:
        self.data, self.seed, self.global_batch, self.rows, self.device = (
            data,
            seed,
            global_batch,
            rows,
            device,
        )
        self.recipe = recipe
        self._next: tuple[int, Future[Tensors]] | None = None
        self._pool: ThreadPoolExecutor | None = None
        if device.type == "cuda":
            # Pinning creates a context on the thread's current GPU, which is the first one by
            # default.
            import torch

            self._pool = ThreadPoolExecutor(
                1, "batches", initializer=torch.cuda.set_device, initargs=(device,)
            )

    def fetch(self, step: int, number: int | None = None) -> Batch:
        """Returns a training step's batch, whose copy to a GPU may be in progress. `number`: the
        strategy's step number; None if no rewind makes it differ."""
        batch_number = step if number is None else number
        if self._pool is None:
            return self._batch(batch_number, step, self._tensors(step))
        if self._next is None or self._next[0] != step:
            self._next = step, self._pool.submit(self._pinned, step)
        tensors = self._next[1].result()
        self._next = step + 1, self._pool.submit(self._pinned, step + 1)
        return self._batch(batch_number, step, tensors)

    def _batch(self, batch_number: int, step: int, tensors: Tensors) -> Batch:
        there = of_each_tensor(lambda t: t.to(self.device, non_blocking=True), tensors)
        return Batch(batch_number, label_tokens=self._label_tokens(step), **there)

    def _tensors(self, step: int) -> Tensors:
        import torch

        where, recipe = (self.seed, step, self.global_batch), self.recipe
        inputs, labels = self.data.batch(*where, self.rows)
        arrays = {"inputs": inputs, "labels": labels}
        if recipe.padded:
            padding = self._padding(step)[self.rows]
            arrays["inputs"] = np.where(padding, 0, inputs)
        if recipe.some_labels:
            arrays["labels"] = np.where(self._unlabelled(step)[self.rows], IGNORED, labels)
        if recipe.dropout:
            arrays["keys"] = self.data.dropout_keys(*where)[self.rows]
        if recipe.packed:
            arrays["positions"] = self.data.positions(*where)[self.rows]
        return {
            name: torch.from_numpy(array) if isinstance(array, np.ndarray) else array
            for name, array in arrays.items()
        }

    def _padding(self, step: int) -> NDArray[np.bool_]:
        lengths = self.data.lengths(self.seed, step, self.global_batch)
        padding: NDArray[np.bool_] = np.arange(self.data.sequence_length) >= lengths[:, None]
        return padding

    def _unlabelled(self, step: int) -> NDArray[np.bool_]:
        """Returns a mask of unlabelled tokens: padding, and the last token of each document."""
        shape = self.global_batch, self.data.sequence_length
        unlabelled = self._padding(step) if self.recipe.padded else np.zeros(shape, np.bool_)
        if self.recipe.packed:
            positions = self.data.positions(self.seed, step, self.global_batch)
            unlabelled[:, :-1] |= positions[:, 1:] == 0
        return unlabelled

    def _label_tokens(self, step: int) -> float | None:
        weight = self.data.weight(step, self.global_batch)
        if weight is not None:
            labelled = weight
        elif self.recipe.some_labels:
            labelled = float(np.count_nonzero(~self._unlabelled(step)))
        else:
            return None
        samples: int = self.rows.stop - self.rows.start
        return labelled * samples / self.global_batch

    def _pinned(self, step: int) -> Tensors:
        return of_each_tensor(lambda tensor: tensor.pin_memory(), self._tensors(step))
