from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from harness.cell.errors import Refused
from harness.cell.training import Layout, States
from harness.seam import Cell, Export, Job, ModelFacts
from harness.strategies._deepspeed_zero import ZeroOptions
from harness.strategies.deepspeed import Deepspeed
from harness.workloads import Workload, make_workload

if TYPE_CHECKING:
    import torch
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.zero import TiledLinear as DeepspeedTiledLinear
    from torch import Tensor, nn


class TiledLinear(Deepspeed):
    """DeepSpeed ZeRO-3 with the largest linear layers in tiles (TiledLinear), gathered in turn.

    ZeRO-3 alone gathers whole layers, so a layer must fit in memory with its gradient; tiled, only
    a tile must.
    """

    capabilities = ZeroOptions.capabilities

    stage: Literal[3] = 3
    """ZeRO stage; only stage 3 gathers tiles one by one."""
    out_tiles: int = Field(default=4, ge=1)
    """Tiles along the output dimension."""
    in_tiles: int = Field(default=1, ge=1)
    """Tiles along the input dimension, whose results are summed."""

    def check(self, cell: Cell, workload: Workload) -> None:
        super().check(cell, workload)
        if workload.tied:
            raise Refused(
                f"the linear layer of {workload.name} shares its weight with the embedding, so it"
                " cannot be tiled; use a llama workload"
            )

    def export(self, cell: Cell, to: str) -> Export | None:
        plain = None if to == "accelerate" else super().export(cell, to)
        return plain and dataclasses.replace(plain, template="tiled_linear.py.j2")

    def partitioned(self, workload: Workload, facts: ModelFacts) -> ModelFacts:
        named = dict(tiles_of(workload, facts, self.out_tiles, self.in_tiles))
        return dataclasses.replace(facts, trainable=tuple(named), sizes=tuple(named.values()))

    def build(self, job: Job) -> nn.Module:
        return tile_largest(super().build(job), self.out_tiles, self.in_tiles, job.device)

    def whole(self, engine: DeepSpeedEngine) -> Iterator[tuple[str, Tensor]]:
        return join_tiles(engine.module, super().whole(engine))

    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States | None:
        tiled = self.partitioned(make_workload(cell.workload), facts)
        return super().states(cell, layout, tiled)

    def traffic(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float | None:
        tiled = self.partitioned(make_workload(cell.workload), facts)
        return super().traffic(cell, layout, tiled)


def tiles_of(
    workload: Workload, facts: ModelFacts, out_tiles: int, in_tiles: int
) -> Iterator[tuple[str, int]]:
    """Yields names and elements of trained parameters, with the largest layers in tiles."""
    layers = largest_layers(workload)
    for name, size in zip(facts.trainable, facts.sizes, strict=True):
        path, _, kind = name.rpartition(".")
        if path not in layers:
            yield name, size
            continue
        inputs, outputs = layers[path]
        columns = _parts(inputs, in_tiles) if kind == "weight" else [1]
        for row, height in enumerate(_parts(outputs, out_tiles)):
            for column, width in enumerate(columns):
                yield f"{path}.linears.{row}.{column}.{kind}", height * width


@functools.cache
def largest_layers(workload: Workload) -> dict[str, tuple[int, int]]:
    """Returns the numbers of inputs and outputs of the largest linear layers, by path."""
    from torch import nn

    modules = workload.on_meta().named_modules()
    linear = {name: m for name, m in modules if isinstance(m, nn.Linear)}
    largest = max((m.weight.numel() for m in linear.values()), default=0)
    return {
        name: (m.in_features, m.out_features)
        for name, m in linear.items()
        if m.weight.numel() == largest
    }


def _parts(size: int, count: int) -> list[int]:
    return [size // count + (number < size % count) for number in range(count)]


def tile_largest(
    model: nn.Module, out_tiles: int, in_tiles: int, device: torch.device
) -> nn.Module:
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
    """Yields whole parameters by name, with tiles joined under their layer's name.

    `named` must yield a layer's tiles consecutively.
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


def _count(layer: DeepspeedTiledLinear) -> int:
    return int(layer.out_splits * layer.in_splits + layer.out_splits * bool(layer.use_bias))


def _joined(
    name: str, layer: DeepspeedTiledLinear, tiles: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    import torch

    rows, columns = range(layer.out_splits), range(layer.in_splits)
    weights = [torch.cat([tiles[f"{r}.{c}.weight"] for c in columns], 1) for r in rows]
    yield f"{name}.weight", torch.cat(weights)
    if layer.use_bias:
        yield f"{name}.bias", torch.cat([tiles[f"{r}.{columns[-1]}.bias"] for r in rows])
