"""What fairscale's wrappers keep between steps, what sending in fp16 costs them, and how gradients
are cleared."""

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
    """Gradients in pinned host memory, which FullyShardedDataParallel keeps for shards that are
    offloaded."""
    for parameter in model.parameters():
        if hasattr(parameter, "_cpu_grad"):
            yield "library", "pinned gradients", parameter._cpu_grad


def clear(model: ShardedDataParallel, optimizer: OSS) -> None:
    """Zeroes the gradients that are in buckets and frees those that are not.

    OSS's own `zero_grad` sets all to None, as torch's has done since 2.0, and so takes them out of
    the buckets that ShardedDataParallel reduces: from the second step on each rank updates with its
    own gradients alone. The `zero_grad` of the optimizer inside OSS clears this rank's parameters
    only, and the others' gradients add up.
    """
    model.zero_grad(set_to_none=True)


def retained_by_oss(model: ShardedDataParallel, optimizer: OSS) -> Iterator[Retained]:
    """Buckets first: gradients are views of the one kind, parameters of the other."""
    for bucket in model._bucket_list:
        yield "library", "reduce buckets of ShardedDataParallel", bucket.buffer
    for device in optimizer.buckets.values():
        for bucket in device.values():
            yield "parameters", "broadcast buckets of OSS", bucket.buffer
    yield from retained_by(model, [optimizer.optim])


def check_flat(cell: Cell, workload: Workload) -> None:
    """Raises Refused where a flat parameter would have to be trained in part, and as
    `check_recompute`."""
    check_recompute(cell)
    if workload.partly_frozen:
        raise Refused(
            f"{workload.name} freezes most parameters, and a flat parameter is trained or frozen as"
            " a whole: use fsdp1 or fsdp2"
        )


def check_recompute(cell: Cell) -> None:
    """Raises Refused where fairscale's checkpoint_wrapper would not compute the same again."""
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
    """Lets the blocks be computed again during backward by fairscale's checkpoint_wrapper, which
    replaces their forward and leaves names as they are."""
    from fairscale.nn.checkpoint import checkpoint_wrapper

    for block in blocks:
        checkpoint_wrapper(block)
