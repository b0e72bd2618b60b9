from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from harness.cell.training import Batch, Retained, TrainStep
from harness.seam import Capabilities, Emulation, Job
from harness.seam.job import backward_of, loss_scaler, update_of

if TYPE_CHECKING:
    from torch import Tensor, nn

POWER_SGD_RANK, FIRST_COMPRESSED = 4, 2
"""Rank of the approximation, and the first step that uses it, because DDP rearranges its buckets in
the second backward."""
LEAST_SAVING = 2
"""Factor by which compression must shrink a matrix, as in torch."""
SEED, SEEDS = 0, 1_000_000_000
"""torch's seed for drawing the buckets' seeds, and their upper bound."""


class PowerSgd(Emulation):
    """PowerSGD (arXiv 1905.13727) between ranks that one process trains one after the other.

    Like torch's hook, keeps errors and factors, and draws random numbers in the order in which
    gradients are complete.
    """

    capabilities = Capabilities(process_group=False)

    ranks: int = Field(ge=1)
    first_bucket_bytes: int
    """Size of DDP's first gradient bucket."""
    bucket_bytes: int
    """Size of every other gradient bucket."""

    @property
    def emulated_ranks(self) -> int:
        return self.ranks

    def setup(self, job: Job) -> TrainStep:
        import torch

        parts = job.cell.micro_batches // self.ranks
        model = job.model()
        optimizer = job.optimizer_of(model)
        buckets: list[Bucket] = []
        job.register(model, optimizer).library = lambda: [t for b in buckets for t in b.retained()]
        parts_job = dataclasses.replace(
            job, cell=job.cell.model_copy(update={"micro_batches": parts})
        )
        scaler = loss_scaler(parts_job)
        backward, update = (
            backward_of(parts_job, model, scaler),
            update_of(parts_job, optimizer, scaler),
        )
        completed = completion_order(model)

        def step(batch: Batch) -> Tensor:
            losses, gradients = [], []
            for part in batch.split(self.ranks):
                optimizer.zero_grad()
                losses.append(backward(part))
                gradients.append([gradient_of(parameter) for parameter in completed])
            if batch.step >= FIRST_COMPRESSED and not buckets:
                sizes = self.first_bucket_bytes, self.bucket_bytes
                buckets.extend(buckets_of(list(completed), *sizes, self.ranks))
            exchange(gradients, buckets if batch.step >= FIRST_COMPRESSED else [])
            for parameter, gradient in zip(completed, gradients[0], strict=True):
                parameter.grad = gradient
            update()
            return torch.stack(losses).mean()

        return step


def completion_order(model: nn.Module) -> Collection[Tensor]:
    """Returns a collection that the first backward fills with parameters, in the order in which
    their gradients are complete."""
    completed: dict[Tensor, None] = {}

    def note(parameter: Tensor) -> None:
        completed.setdefault(parameter)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(note)
    return completed.keys()


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


class Bucket:
    """PowerSGD's state for consecutive gradients that share a bucket."""

    def __init__(self, shapes: Sequence[Tensor], places: range, ranks: int, seed: int) -> None:
        import torch

        by_shape = defaultdict[tuple[int, ...], list[int]](list)
        for index in places:
            rows, columns = shape = _matrix(shapes[index]).shape
            rank = min(rows, columns, POWER_SGD_RANK)
            if (rows + columns) * rank * LEAST_SAVING < rows * columns:
                by_shape[shape].append(index)
        generator = torch.Generator().manual_seed(seed)
        self.factors = {
            index: torch.randn(columns, min(rows, columns, POWER_SGD_RANK), generator=generator)
            for (rows, columns), alike in by_shape.items()
            for index in alike
        }
        self.errors = {
            index: [torch.zeros_like(_matrix(shapes[index])) for _ in range(ranks)]
            for index in self.factors
        }

    def retained(self) -> Iterator[Retained]:
        for index, factor in self.factors.items():
            yield "library", f"factor of gradient {index}", factor
            for error in self.errors[index]:
                yield "library", f"error of gradient {index}", error

    def compress(self, index: int, gradients: Sequence[Tensor]) -> None:
        """Replaces every rank's matrix by the approximation of their mean."""
        import torch

        errors = self.errors[index]
        for matrix, error in zip(gradients, errors, strict=True):
            matrix += error
        device = gradients[0].device
        right = torch.linalg.qr(self.factors[index].to(device))[0]
        left = torch.linalg.qr(sum_of([matrix @ right for matrix in gradients]))[0]
        right = sum_of([matrix.t() @ left for matrix in gradients]) / len(gradients)
        self.factors[index] = right
        approximation = left @ right.t()
        for number, matrix in enumerate(gradients):
            errors[number] = matrix - approximation
            matrix.copy_(approximation)


def exchange(gradients: Sequence[Sequence[Tensor]], buckets: Sequence[Bucket]) -> None:
    """Replaces every rank's gradients by their mean, or by its approximation in these buckets."""
    by_place = {index: bucket for bucket in buckets for index in bucket.factors}
    for index, copies in enumerate(zip(*gradients, strict=True)):
        if index in by_place:
            by_place[index].compress(index, [_matrix(copy) for copy in copies])
        else:
            mean = sum_of(copies) / len(copies)
            for copy in copies:
                copy.copy_(mean)


def buckets_of(
    gradients: Sequence[Tensor], first_limit: int, later_limit: int, ranks: int
) -> Iterator[Bucket]:
    """Yields DDP's buckets: each is full when it reaches its limit in bytes."""
    import numpy as np

    seeds = np.random.RandomState(SEED)
    first, size, limit = 0, 0, first_limit
    for index, gradient in enumerate(gradients):
        size += gradient.nbytes
        if size >= limit or index == len(gradients) - 1:
            yield Bucket(gradients, range(first, index + 1), ranks, int(seeds.randint(SEEDS)))
            first, size, limit = index + 1, 0, later_limit


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def _matrix(gradient: Tensor) -> Tensor:
    return gradient.view(gradient.shape[0], -1)
