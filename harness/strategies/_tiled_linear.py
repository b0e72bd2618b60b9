"""DeepSpeed's TiledLinear in the place of a model's largest linear layers, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from deepspeed.runtime.zero import TiledLinear
    from torch import Tensor, nn


def tile_largest(
    model: nn.Module, out_tiles: int, in_tiles: int, device: torch.device
) -> nn.Module:
    """Exchanges every `torch.nn.Linear` of the largest size, in place; returns the model."""
    from deepspeed.runtime.zero import TiledLinear
    from torch import nn

    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    largest = max(module.weight.numel() for module in linear.values())
    for name, layer in linear.items():
        if layer.weight.numel() == largest:
            tiled = TiledLinear(
                layer.in_features,
                layer.out_features,
                in_splits=in_tiles,
                out_splits=out_tiles,
                bias=layer.bias is not None,
                init_linear=layer,
                device=device,
            )
            model.set_submodule(name, tiled)
    return model


def join_tiles(
    model: nn.Module, named: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters by name: tiles are put together again, under the name of the layer that they
    took the place of.

    `named` gives a layer's tiles one after the other, and a gathered tensor is this rank's until
    the next is asked for.
    """
    from deepspeed.runtime.zero import TiledLinear

    layers = {name: m for name, m in model.named_modules() if isinstance(m, TiledLinear)}
    tiles: dict[str, Tensor] = {}
    for name, tensor in named:
        layer = next((layer for layer in layers if name.startswith(f"{layer}.linears.")), None)
        if layer is None:
            yield name, tensor
            continue
        tiles[name.removeprefix(f"{layer}.linears.")] = tensor.detach().clone()
        if len(tiles) == _count(layers[layer]):
            yield from _joined(layer, layers[layer], tiles)
            tiles.clear()


def _count(layer: TiledLinear) -> int:
    """Parameters of a tiled layer: a weight a tile, and a bias in the last column of each row."""
    return int(layer.out_splits * layer.in_splits + layer.out_splits * bool(layer.use_bias))


def _joined(
    name: str, layer: TiledLinear, tiles: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    import torch

    rows, columns = range(layer.out_splits), range(layer.in_splits)
    weights = [torch.cat([tiles[f"{r}.{c}.weight"] for c in columns], 1) for r in rows]
    yield f"{name}.weight", torch.cat(weights)
    if layer.use_bias:
        yield f"{name}.bias", torch.cat([tiles[f"{r}.{columns[-1]}.bias"] for r in rows])
