"""How torch's FSDP is told what to gather, and when."""

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
    """FSDP1's unit is a block; where the workload does not say which modules are blocks, a unit is
    a module that has at least an eighth of the parameters."""
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

    if blocks := job.workload.blocks_of(model):
        return ModuleWrapPolicy({type(block) for block in blocks})
    parameters = sum(p.numel() for p in model.parameters())
    return functools.partial(size_based_auto_wrap_policy, min_num_params=parameters // 8)


def backward_prefetch(when: str) -> BackwardPrefetch | None:
    """FSDP1's word for `pre`, `post` or `none`."""
    from torch.distributed.fsdp import BackwardPrefetch

    return None if when == "none" else BackwardPrefetch[f"BACKWARD_{when.upper()}"]


def summoned_parameters(model: FullyShardedDataParallel) -> Iterator[tuple[str, nn.Parameter]]:
    """FSDP1's parameters by name, whole while they are looked at; to be walked on all ranks."""
    with type(model).summon_full_params(model, writeback=False):
        yield from model.named_parameters()


def check_options(cell: Cell, hybrid: bool, mixed_precision: bool, offload: bool) -> None:
    """Raises Refused where FSDP2 would not train in the cell's precision, or has too few devices
    for hybrid sharding."""
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
    """Parameters gathered in bf16 and gradients reduced in fp32, or as they are; shards kept on the
    device, or in host memory."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    host = CPUOffloadPolicy(pin_memory=job.device.type == "cuda")
    return {
        "mp_policy": mixed if mixed_precision else MixedPrecisionPolicy(),
        "offload_policy": host if offload else OffloadPolicy(),
    }


def prefetch_neighbours(blocks: Sequence[FSDPModule]) -> None:
    """FSDP2 gathers the next block while one computes: forward the one after, backward the one
    before."""
    for block, after in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([block])


def shards_on_device(job: Job, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters by name; offloaded shards must be on the device to be gathered over its process
    group."""
    return ((name, p.detach().to(job.device)) for name, p in model.named_parameters())


@contextlib.contextmanager
def without_sync(root: FSDPModule) -> Iterator[None]:
    """Within it FSDP2 reduces no gradients."""
    root.set_requires_gradient_sync(False)
    yield
    root.set_requires_gradient_sync(True)


def sharded_messages(
    cell: Cell, blocks: int, gathered_again: bool, hybrid: bool, no_sync: bool = True
) -> float:
    """Collectives of a step: each micro-batch gathers the root's parameters once, and those of each
    block once more for backward where they were freed; each unit's gradients are scattered, and
    under hybrid sharding all-reduced too, after the last micro-batch, or without `no_sync` after
    each."""
    units, parts = blocks + 1, cell.micro_batches
    gathers = parts * (units + (blocks if gathered_again else 0))
    return float(gathers + (parts if not no_sync else 1) * units * (2 if hybrid else 1))
