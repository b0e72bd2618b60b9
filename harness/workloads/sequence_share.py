"""Simulates one rank of sequence parallelism, to count its memory.

It has all tokens only within attention and MLP (Korthikanti et al., arXiv 2205.05198, section
4.2.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

TOKENS, FEATURES = 1, -1
"""Dimensions of hidden states and logits."""


Context: TypeAlias = Any
"""What torch's autograd gives a function; it has no type."""


def share_sequence(model: nn.Module, plan: Mapping[str, object], ranks: int) -> None:
    """Adds exchanges to one rank's share of a model; `plan`: torch's ParallelStyle by path."""
    for path, style in plan.items():
        for name, module in model.named_modules():
            if fnmatch(name, path):
                _exchange(module, style, ranks)


def _exchange(module: nn.Module, style: object, ranks: int) -> None:
    def gather_inputs(
        _: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = getattr(style, "input_kwarg_layouts", {})
        gathered = {
            name: _applied(Gathered, value, ranks)
            for name, value in named.items()
            if name in hidden
        }
        return tuple(_applied(Gathered, value, ranks) for value in inputs), {**named, **gathered}

    if isinstance(style, RowwiseParallel) and style.output_layouts[0].is_shard(TOKENS):
        module.register_forward_hook(lambda *called: _applied(Scattered, called[2], ranks))
    takes_part = isinstance(style, ColwiseParallel) and style.input_layouts[0].is_shard(TOKENS)
    if takes_part or isinstance(style, PrepareModuleInput):
        module.register_forward_pre_hook(gather_inputs, with_kwargs=True)
    if takes_part:  # the head: every rank has all logits
        module.register_forward_hook(lambda *called: _applied(GatheredLogits, called[2], ranks))


def _applied(function: Any, tensor: Tensor, ranks: int) -> Tensor:
    result: Tensor = function.apply(tensor, ranks)
    return result


def _all_gather(part: Tensor, ranks: int, dimension: int) -> Tensor:
    return torch.cat(torch.cat([part] * ranks).chunk(ranks), dimension)


def _reduce_scatter(whole: Tensor, ranks: int) -> Tensor:
    return torch.cat(whole.chunk(ranks, TOKENS)).chunk(ranks)[0].clone()


class Gathered(torch.autograd.Function):
    """Gathers all tokens; backward sums gradients over ranks and scatters them by tokens."""

    @staticmethod
    def forward(ctx: Context, part: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return _all_gather(part, ranks, TOKENS)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(gradients[0], ctx.ranks), None


class Scattered(torch.autograd.Function):
    """Keeps a rank's tokens of the sum over ranks; backward gathers all gradients."""

    @staticmethod
    def forward(ctx: Context, whole: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return _reduce_scatter(whole, ranks)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_gather(gradients[0], ctx.ranks, TOKENS), None


class GatheredLogits(torch.autograd.Function):
    """Gathers the logits of the whole vocabulary; backward keeps a rank's part."""

    @staticmethod
    def forward(ctx: Context, part: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return _all_gather(part, ranks, FEATURES)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].chunk(ctx.ranks, FEATURES)[0].contiguous(), None
