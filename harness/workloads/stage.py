"""Consecutive blocks of a workload's own model: the unit of pipeline, tensor and 3D parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

    from harness.workloads.model import Workload


class Stage(nn.Module):
    """Blocks `start` to `stop` of `model`; the first stage also embeds, the last also gives the logits.

    What other stages own is replaced by parameterless placeholders, so parameters keep the whole model's names.
    `tokens` is the length of a whole sequence.
    """

    def __init__(self, workload: Workload, model: nn.Module, index: int, count: int, tokens: int) -> None:
        super().__init__()
        assert workload.split is not None
        self.split, self.tokens = workload.split, tokens
        blocks = model.get_submodule(self.split.blocks)
        assert isinstance(blocks, nn.ModuleList)
        self.first, self.last = index == 0, index == count - 1
        self.start, self.stop = len(blocks) * index // count, len(blocks) * (index + 1) // count
        for other in (*range(self.start), *range(self.stop, len(blocks))):
            blocks[other] = nn.Identity()
        for path in (() if self.first else self.split.embedding) + (() if self.last else self.split.head):
            model.set_submodule(path, nn.Identity())
        self.model = model

    def forward(self, hidden: Tensor) -> Tensor:
        """Token ids on the first stage, hidden states elsewhere; logits from the last stage, else hidden states."""
        if self.first:
            hidden = self.split.embed(self.model, hidden)
        blocks = self.model.get_submodule(self.split.blocks)
        assert isinstance(blocks, nn.ModuleList)
        for index in range(self.start, self.stop):
            hidden = self.split.block(self.model, blocks[index], hidden, self.tokens)
        return self.split.output(self.model, hidden) if self.last else hidden


def split_tensors(stage: Stage, mesh: object, sequence_parallel: bool) -> dict[str, object]:
    """Splits the stage's weights over a tensor-parallel mesh in place; returns how whole tensors are restored."""
    from torch.distributed.tensor.parallel import parallelize_module

    size = mesh.size()  # type: ignore[attr-defined]
    restore = stage.split.prepare_tensor(stage.model, size)
    plan = {f"model.{path}": style for path, style in stage.split.tensor_plan(sequence_parallel).items()}
    present = {name for name, module in stage.named_modules() if not isinstance(module, nn.Identity)}
    wanted = {path: style for path, style in plan.items() if "*" in path or path in present}
    skip = {i for i in range(_count(stage)) if not stage.start <= i < stage.stop}
    expanded = {
        path.replace("*", str(i)): style
        for path, style in wanted.items()
        for i in (range(_count(stage)) if "*" in path else [0])
        if "*" not in path or i not in skip
    }
    parallelize_module(stage, mesh, expanded)  # type: ignore[arg-type]
    return dict(restore)


def _count(stage: Stage) -> int:
    blocks = stage.model.get_submodule(stage.split.blocks)
    assert isinstance(blocks, nn.ModuleList)
    return len(blocks)


def untie(stage: Stage) -> None:
    """Gives the last stage's tied parameters storage of their own, as they have on another rank than their twin."""
    for name in stage.split.tied:
        owner, _, leaf = name.rpartition(".")
        module = stage.model.get_submodule(owner)
        if isinstance(module, nn.Identity):
            continue
        setattr(module, leaf, nn.Parameter(torch.clone(getattr(module, leaf).detach())))
