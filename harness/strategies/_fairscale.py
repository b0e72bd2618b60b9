"""fairscale's retained buffers, fp16 tolerances and gradient clearing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from harness.measure.states import retained_by
from harness.strategy import Cell, Refused, Retained, Tolerance, Workload

if TYPE_CHECKING:
    from fairscale.nn.data_parallel import FullyShardedDataParallel, ShardedDataParallel
    from fairscale.optim import OSS
    from torch import nn

REDUCED = Tolerance(1e-3, 0.2, "gradients travel in fp16")
BROADCAST = Tolerance(
    1e-3,
    0.6,
    "updated parameters travel in fp16 and stay rounded to it: no rank keeps them in fp32",
)


def pinned_gradients(model: FullyShardedDataParallel) -> Iterator[Retained]:
    """Yields pinned host gradients that FullyShardedDataParallel keeps for offloaded shards."""
    for parameter in model.parameters():
        if hasattr(parameter, "_cpu_grad"):
            yield "library", "pinned gradients", parameter._cpu_grad


def clear(model: ShardedDataParallel, optimizer: OSS) -> None:
    """Zeroes gradients in buckets and frees all others.

    OSS's `zero_grad` sets all to None, torch's default since 2.0. That detaches them from
    ShardedDataParallel's buckets, and from the second step ranks update with local gradients. The
    inner optimizer's clears only this rank's parameters, so other gradients accumulate.
    """
    model.zero_grad(set_to_none=True)


def retained_by_oss(model: ShardedDataParallel, optimizer: OSS) -> Iterator[Retained]:
    """Yields buckets before the gradients and parameters that are views of them."""
    for bucket in model._bucket_list:
        yield "library", "reduce buckets of ShardedDataParallel", bucket.buffer
    for device in optimizer.buckets.values():
        for bucket in device.values():
            yield "parameters", "broadcast buckets of OSS", bucket.buffer
    yield from retained_by(model, [optimizer.optim])


def check_flat(cell: Cell, workload: Workload) -> None:
    """Raises Refused if a flat parameter would be partly frozen, or by `check_recompute`."""
    check_recompute(cell)
    if workload.partly_frozen:
        raise Refused(
            f"{workload.name} freezes most parameters, and a flat parameter is trained or frozen as"
            " a whole: use fsdp1 or fsdp2"
        )


def check_recompute(cell: Cell) -> None:
    """Raises Refused if fairscale's checkpoint_wrapper would not recompute the same."""
    if cell.recompute == "selective":
        raise Refused(
            "fairscale's checkpoint_wrapper computes whole blocks again: use recompute full, or"
            " ddp or fsdp2 for selective"
        )
    if cell.recompute == "full" and cell.precision != "fp32":
        raise Refused(
            "fairscale's checkpoint_wrapper computes blocks again in CUDA's default autocast"
            f" precision, fp16, and on CPUs without autocast: use precision fp32, not"
            f" {cell.precision}"
        )


def recompute_by_fairscale(model: nn.Module, blocks: Sequence[nn.Module], recompute: str) -> None:
    """Recomputes the blocks by fairscale's checkpoint_wrapper, which replaces their forward."""
    from fairscale.nn.checkpoint import checkpoint_wrapper

    for block in blocks:
        checkpoint_wrapper(block)
