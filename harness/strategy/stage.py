"""Consecutive blocks of a workload's model: the unit of pipeline, tensor and 3D parallelism."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import TYPE_CHECKING

from torch import nn

from harness.strategy.schedules import blocks_of_stage

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from harness.strategy.job import Job


class Stage(nn.Module):
    """Stage `index` of `count`: its blocks, and the embedding if first, the head if last.

    Placeholders replace other stages' modules, which preserves parameter names. Tied parameters
    have separate storage on each stage, see harness/strategy/pipelining.py.
    """

    def __init__(self, job: Job, index: int = 0, count: int = 1) -> None:
        super().__init__()
        split = job.workload.split
        assert split is not None
        self.index, self.count, self.split = index, count, split
        self.autocast, self.tokens = job.autocast, job.cell.sequence_length
        model = job.model()
        self.all_blocks = len(model.get_submodule(split.blocks))  # type: ignore[arg-type]
        for block in set(range(self.all_blocks)) - set(self.own_blocks):
            model.set_submodule(f"{split.blocks}.{block}", nn.Identity())
        for path in (() if self.first else split.embedding) + (() if self.last else split.head):
            model.set_submodule(path, nn.Identity())
        self.model = model

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1

    @property
    def own_blocks(self) -> range:
        return blocks_of_stage(self.all_blocks, self.index, self.count)

    @property
    def blocks(self) -> list[nn.Module]:
        return [
            self.model.get_submodule(f"{self.split.blocks}.{block}") for block in self.own_blocks
        ]

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps token ids (first stage) or hidden states to logits (last stage) or hidden states."""
        with self.autocast():
            if self.first:
                hidden = self.split.embed(self.model, hidden)
            for block in self.blocks:
                hidden = self.split.block(self.model, block, hidden, self.tokens)
            return self.split.output(self.model, hidden) if self.last else hidden


def split_tensors(
    stage: Stage, mesh: DeviceMesh, sequence_parallel: bool = False
) -> dict[str, Callable[[Tensor], Tensor]]:
    """Splits weights over a tensor-parallel mesh, in place; returns functions that restore them, by
    name."""
    from torch.distributed.tensor.parallel import parallelize_module

    restore = stage.split.prepare_tensor(stage.model, mesh.size())
    plan = stage.split.tensor_plan(sequence_parallel)
    own = [
        name for name, module in stage.model.named_modules() if not isinstance(module, nn.Identity)
    ]
    parallelize_module(
        stage.model,
        mesh,
        {name: style for name in own for path, style in plan.items() if fnmatch(name, path)},
    )
    return restore
