"""Dropout with masks that do not depend on the layout, but on layer, feature and the token's
key."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from harness.workloads.recompute import MASKS

BITS = 0xFFFFFFFF
MULTIPLIER = 0x45D9F3B
"""Factor of the hash, small enough that products fit into 64 bits."""
LAYER_STRIDE = 0x9E3779B9


class Masks:
    """Keys of the current tokens, shared by a model's dropout layers."""

    keys: Tensor | None = None
    """Keys of the current tokens, shape (samples, tokens), as 32-bit integers."""

    def recomputing(self, forward: Callable[..., object]) -> Callable[..., object]:
        """Wraps a function so that it always runs with the current keys."""
        keys = self.keys

        def with_keys(*args: object, **kwargs: object) -> object:
            before, self.keys = self.keys, keys
            try:
                return forward(*args, **kwargs)
            finally:
                self.keys = before

        return with_keys


class KeyedDropout(nn.Module):
    """Dropout of hidden states (samples, tokens, features) by the current tokens' keys."""

    def __init__(self, share: float, layer: int, masks: Masks) -> None:
        super().__init__()
        self.share, self.layer, self.masks = share, layer, masks

    def forward(self, hidden: Tensor) -> Tensor:
        keys = self.masks.keys
        if keys is None or keys.shape != hidden.shape[:2]:
            got = None if keys is None else tuple(keys.shape)
            raise RuntimeError(
                f"dropout got hidden states of shape {tuple(hidden.shape)} and keys of shape {got}:"
                " the strategy must pass each batch to job.loss, or set the keys itself"
            )
        factors = mask(keys, self.layer, hidden.shape[-1], self.share)
        return hidden * factors.to(hidden.dtype)


def mask(keys: Tensor, layer: int, features: int, share: float) -> Tensor:
    """Returns factors (samples, tokens, features): 0 for this share of features, else `1 / (1 -
    share)`."""
    rows = _hashed((keys + layer * LAYER_STRIDE) & BITS)[..., None]
    columns = _hashed(torch.arange(1, features + 1, device=keys.device))
    mask = _hashed(rows ^ columns) >= share * (BITS + 1)
    return mask / (1 - share)


def _hashed(numbers: Tensor) -> Tensor:
    for _ in range(2):
        numbers = ((numbers >> 16) ^ numbers) * MULTIPLIER & BITS
    return (numbers >> 16) ^ numbers


def place_dropout(
    model: nn.Module, layers: Sequence[str], blocks: Sequence[nn.Module], share: float, masks: Masks
) -> None:
    """Replaces the dropout layers at these paths, in place. Blocks remember the masks, so that
    recomputed blocks get the same ones (see `recompute_blocks`)."""
    for number, path in enumerate(layers):
        model.set_submodule(path, KeyedDropout(share, number, masks))
    for block in blocks:
        setattr(block, MASKS, masks)


def masks_of(model: nn.Module) -> Masks:
    return next(layer.masks for layer in model.modules() if isinstance(layer, KeyedDropout))


def without_dropout(model: nn.Module) -> None:
    """Turns torch's dropout off, whose random numbers would depend on the layout."""
    from torch.nn.modules.dropout import _DropoutNd

    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0
