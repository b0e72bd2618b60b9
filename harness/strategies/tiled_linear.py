"""Memory-centric tiling by DeepSpeed's TiledLinear."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from harness.strategies._tiled_linear import join_tiles, tile_largest
from harness.strategies.deepspeed import Deepspeed, DeepspeedCosts
from harness.strategy import Cell, Job, Refused, Workload

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from torch import Tensor, nn


class TiledLinear(Deepspeed):
    """DeepSpeed ZeRO-3 with the largest linear layers in tiles (TiledLinear), gathered in turn.

    ZeRO-3 alone needs memory for a whole layer, its gradient and both their buffers. With tiling
    only one tile must fit. Every `torch.nn.Linear` of the largest size is replaced.
    """

    stage: Literal[3] = 3
    """ZeRO stage; only stage 3 gathers tiles one by one."""
    out_tiles: int = Field(default=4, ge=1)
    """Tiles along the output dimension."""
    in_tiles: int = Field(default=1, ge=1)
    """Tiles along the input dimension, whose results are summed."""

    def check(self, cell: Cell, workload: Workload) -> None:
        super().check(cell, workload)
        if workload.split is not None and workload.split.tied:
            raise Refused(
                f"the linear layer of {workload.name} shares its weight with the embedding, which"
                " tiles cannot; use a llama workload"
            )

    def build(self, job: Job) -> nn.Module:
        return tile_largest(super().build(job), self.out_tiles, self.in_tiles, job.device)

    def whole(self, engine: DeepSpeedEngine) -> Iterator[tuple[str, Tensor]]:
        return join_tiles(engine.module, super().whole(engine))

    @property
    def costs(self) -> TiledLinearCosts:
        return TiledLinearCosts(self)


class TiledLinearCosts(DeepspeedCosts):
    @property
    def backend_library(self) -> str:
        return "deepspeed"
