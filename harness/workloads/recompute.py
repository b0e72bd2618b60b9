"""Recomputation: what blocks save in forward and recompute in backward.

`full` saves only a block's input (Chen et al., arXiv 1604.06174). `selective` also saves results of
matrix products and attention (Korthikanti et al., arXiv 2205.05198, section 5).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch._ops import OpOverload, OpOverloadPacket

Shape = Sequence[int]
MASKS = "dropout_masks"
"""Attribute of blocks with dropout: see harness/workloads/dropout.py."""


@functools.cache
def products() -> Mapping[OpOverloadPacket, Callable[..., int]]:
    """Returns FLOP counters of matrix products, convolutions and attention, by
    torch.utils.flop_counter."""
    import torch
    from torch.utils.flop_counter import flop_registry, sdpa_flop_count, shape_wrapper

    def of_cpus(query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
        return int(sdpa_flop_count(query, key, value))

    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    further = {attention: of_cpus, **grouped_products()}
    return {**flop_registry, **{name: shape_wrapper(count) for name, count in further.items()}}


@functools.cache
def grouped_products() -> Mapping[OpOverloadPacket, Callable[..., int]]:
    """Returns FLOP counters of grouped products (rows by their experts' matrices)."""
    import torch

    def forward(rows: Shape, matrices: Shape, *_: object, **__: object) -> int:
        return 2 * math.prod(rows) * matrices[-1]

    def backward(rows: Shape, matrices: Shape, *_: object, **__: object) -> int:
        return 2 * forward(rows, matrices)

    operator = experts_backward()
    return {
        torch.ops.aten._grouped_mm: forward,
        torch.ops.transformers.grouped_mm_fallback: forward,
        **({operator: backward} if operator else {}),
    }


def experts_backward() -> OpOverloadPacket | None:
    """Returns transformers' own backward of its grouped product; None before 5.23."""
    import torch
    import transformers.integrations.moe  # noqa: F401 registers its operators

    return getattr(torch.ops.transformers, "grouped_mm_fallback_backward", None)


def checkpoint_arguments(recompute: str) -> dict[str, Any]:
    if recompute == "full":
        return {"use_reentrant": False}
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(context: object, operator: OpOverload, *of: Any, **_: object) -> CheckpointPolicy:
        keep = operator._overloadpacket in products() and not _dot_products(operator, of)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return {"use_reentrant": False, "context_fn": contexts}


def _dot_products(operator: OpOverload, arguments: Sequence[Any]) -> bool:
    """Returns whether a row is multiplied by a column. DeepSpeed's gate divides such products in
    place, which torch forbids for saved tensors."""
    if operator._opname != "bmm":
        return False
    return bool(arguments[0].shape[-2] == 1 and arguments[1].shape[-1] == 1)


def recompute_blocks(model: nn.Module, blocks: Sequence[nn.Module], recompute: str) -> None:
    """Makes blocks recompute in backward, in place.

    Each block's class becomes a subclass with a checkpointed forward, so that parameters keep their
    names and hooks are not rerun.
    """
    from torch.utils.checkpoint import checkpoint

    arguments = checkpoint_arguments(recompute)
    run = functools.partial(checkpoint, preserve_rng_state=False, **arguments)
    kinds: dict[type[nn.Module], type[nn.Module]] = {}
    for block in blocks:
        kind = type(block)
        if kind not in kinds:
            kinds[kind] = _checkpointed(kind, run)
        block.__class__ = kinds[kind]


def offload_blocks(blocks: Sequence[nn.Module], pinned: bool) -> None:
    """Makes blocks keep what backward needs in host memory, in place, recomputed or not.

    torch's `save_on_cpu` copies whatever is saved, weights included. A tensor that it kept on the
    device would be overwritten if the library reuses its memory.
    """
    from torch.autograd.graph import save_on_cpu

    def offloaded(forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        with save_on_cpu(pin_memory=pinned):
            return forward(*args, **kwargs)

    for block in blocks:
        block.forward = functools.partial(offloaded, block.forward)


def _checkpointed(kind: type[nn.Module], run: Callable[..., object]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        block = functools.partial(kind.forward, self)
        masks = getattr(self, MASKS, None)
        return run(masks.recomputing(block) if masks else block, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
