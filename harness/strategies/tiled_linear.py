"""Memory-centric tiling: DeepSpeed's TiledLinear cuts a layer that is too large for a device into
tiles, one gathered at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from harness.spec.cell import Cell
from harness.spec.errors import Refused
from harness.strategies.deepspeed import Deepspeed
from harness.strategy.job import Job

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.workloads import Workload


class TiledLinear(Deepspeed):
    """DeepSpeed ZeRO-3 whose largest linear layers are cut into tiles (TiledLinear), gathered one
    after the other.

    Under ZeRO-3 a layer must fit whole beside the partitions, with its gradient and the buffers of
    both; tiled, only a tile must. All `torch.nn.Linear` of the largest size are exchanged.
    """

    stage: Literal[3] = 3
    """ZeRO stage: tiles are gathered one by one in stage 3 only."""
    out_tiles: int = Field(default=4, ge=1)
    """Tiles along the output dimension."""
    in_tiles: int = Field(default=1, ge=1)
    """Tiles along the input dimension, whose results are added."""

    def check(self, cell: Cell, workload: Workload) -> None:
        super().check(cell, workload)
        if workload.split is not None and workload.split.tied:
            raise Refused(
                f"the linear layer of {workload.name} shares its weight with the embedding, which"
                " tiles cannot; use a llama workload"
            )

    def build(self, job: Job) -> nn.Module:
        from deepspeed.runtime.zero import TiledLinear as Tiled
        from torch import nn

        model = super().build(job)
        linear = [
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
        ]
        largest = max(module.weight.numel() for _, module in linear)
        for name, whole in linear:
            if whole.weight.numel() < largest:
                continue
            told = {
                "in_splits": self.in_tiles,
                "out_splits": self.out_tiles,
                "bias": whole.bias is not None,
                "init_linear": whole,
            }
            model.set_submodule(
                name, Tiled(whole.in_features, whole.out_features, **told, device=job.device)
            )
        return model

    def whole(self, engine: Any) -> Iterator[tuple[str, Tensor]]:
        """Tiles are put together again, under the name of the layer that they took the place of."""
        import torch
        from deepspeed.runtime.zero import TiledLinear as Tiled

        tiled = {
            f"{name}.linears.": m
            for name, m in engine.module.named_modules()
            if isinstance(m, Tiled)
        }
        waiting: dict[str, Tensor] = {}
        for name, tensor in super().whole(engine):
            prefix = next((p for p in tiled if name.startswith(p)), None)
            if prefix is None:
                yield name, tensor
                continue
            waiting[name] = tensor.detach().clone()
            rows, columns = tiled[prefix].out_splits, tiled[prefix].in_splits
            tiles = [
                [waiting.get(f"{prefix}{r}.{c}.weight") for c in range(columns)]
                for r in range(rows)
            ]
            biases = (
                [waiting.get(f"{prefix}{r}.{columns - 1}.bias") for r in range(rows)]
                if tiled[prefix].use_bias
                else []
            )
            if all(tile is not None for row in tiles for tile in row) and all(
                bias is not None for bias in biases
            ):
                layer = prefix.removesuffix(".linears.")
                yield f"{layer}.weight", torch.cat([torch.cat(row, 1) for row in tiles])  # type: ignore[arg-type]
                if biases:
                    yield f"{layer}.bias", torch.cat(biases)  # type: ignore[arg-type]
                waiting.clear()
