"""Configuration of torch's FSDP."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypedDict

from harness.strategy import Cell, Job, Refused, Tolerance
from harness.strategy.sharding import check_hybrid

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        FSDPModule,
        FullyShardedDataParallel,
        MixedPrecisionPolicy,
        OffloadPolicy,
    )

MIXED = Tolerance(
    5e-2, 1.0, "the residual stream and the norms are bf16 too, which autocast keeps in fp32"
)


def wrap_policy(job: Job, model: nn.Module) -> Callable[..., bool]:
    """Returns FSDP1's wrap policy: by block, or if unnamed, modules with an eighth of the
    parameters or more."""
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

    if blocks := job.workload.blocks_of(model):
        return ModuleWrapPolicy({type(block) for block in blocks})
    parameters = sum(p.numel() for p in model.parameters())
    return functools.partial(size_based_auto_wrap_policy, min_num_params=parameters // 8)


def backward_prefetch(when: str) -> BackwardPrefetch | None:
    from torch.distributed.fsdp import BackwardPrefetch

    return None if when == "none" else BackwardPrefetch[f"BACKWARD_{when.upper()}"]


def summoned_parameters(model: FullyShardedDataParallel) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields FSDP1's parameters by name, whole during iteration; iterate on all ranks."""
    with type(model).summon_full_params(model, writeback=False):
        yield from model.named_parameters()


def check_options(cell: Cell, hybrid: bool, mixed_precision: bool, offload: bool) -> None:
    """Raises Refused if FSDP2 would train in another precision, or lacks devices for hybrid
    sharding."""
    if hybrid:
        check_hybrid(cell)
    if mixed_precision and cell.precision != "bf16":
        raise Refused(
            "mixed_precision of fsdp2 is bf16: set the cell's precision to bf16, it is"
            f" {cell.precision}"
        )
    if offload and cell.device == "cuda" and cell.precision == "fp16":
        raise Refused(
            "loss scaling would have to reduce infinities of gradients in host memory over NCCL,"
            " which cannot; use bf16"
        )


class Policies(TypedDict):
    """Keyword arguments of fully_shard."""

    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy


def policies(job: Job, mixed_precision: bool, offload: bool) -> Policies:
    """Returns bf16 gathers and fp32 reductions, or neither; shards on the device or host."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    host = CPUOffloadPolicy(pin_memory=job.device.type == "cuda")
    return {
        "mp_policy": mixed if mixed_precision else MixedPrecisionPolicy(),
        "offload_policy": host if offload else OffloadPolicy(),
    }


def prefetch_neighbours(blocks: Sequence[FSDPModule]) -> None:
    """Makes FSDP2 prefetch the next block in forward, and the previous one in backward."""
    for block, after in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([block])


def shards_on_device(job: Job, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters by name, on the device so that its process group can gather offloaded
    shards."""
    return ((name, p.detach().to(job.device)) for name, p in model.named_parameters())


@contextlib.contextmanager
def without_sync(root: FSDPModule) -> Iterator[None]:
    """Disables FSDP2's gradient reduction within the context."""
    root.set_requires_gradient_sync(False)
    yield
    root.set_requires_gradient_sync(True)


def sharded_messages(
    cell: Cell, blocks: int, gathered_again: bool, hybrid: bool, no_sync: bool = True
) -> float:
    """Returns collectives per step.

    Each micro-batch gathers every unit, and freed blocks again. Each unit's gradients are
    scattered, and for hybrid sharding all-reduced, after the last micro-batch or, without
    `no_sync`, after each.
    """
    units, parts = blocks + 1, cell.micro_batches
    gathers = parts * (units + (blocks if gathered_again else 0))
    return float(gathers + (parts if not no_sync else 1) * units * (2 if hybrid else 1))
