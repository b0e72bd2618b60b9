from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from harness.cell.errors import Refused
from harness.workloads.family import Split
from harness.workloads.structure import Structure

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

HEADS = 2
"""Dimension of heads in the inputs of head norms: (samples, tokens, heads, head width)."""


class PlannedSplit(Split):
    """Split of a model by transformers' pipeline and tensor plans for it.

    A stage calls the model's own forward, which makes masks and positions. Modules of other stages
    pass their input through.
    """

    exported = "its stages run the model's own forward with hooks, which a script cannot have"

    def __init__(self, structure: Structure, hidden_size: int) -> None:
        super().__init__(structure.tied)
        self.structure, self.hidden_size = structure, hidden_size
        self.blocks = structure.block_paths[0]
        self.embedding, self.head = structure.embedding, structure.head
        self.by_column, self.by_row = structure.tensor.column, structure.tensor.row
        self.one_reduction_each = not (structure.tensor.gathered or structure.tensor.heads)

    def stage(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        hidden: Tensor,
        tokens: int,
        *,
        first: bool,
        last: bool,
    ) -> Tensor:
        results: list[Tensor] = []
        hooks = []
        inputs = hidden
        if not first:
            inputs = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
            # Runs before hooks of FSDP, which look for inputs that need gradients.
            hooks.append(
                blocks[0].register_forward_pre_hook(
                    lambda _, arguments: (hidden, *arguments[1:]), prepend=True
                )
            )
        if not last:
            hooks.append(
                blocks[-1].register_forward_hook(lambda *call: results.append(_hidden(call[2])))
            )
        try:
            logits: Tensor = model(inputs).logits
        finally:
            for hook in hooks:
                hook.remove()
        return logits if last else results[0]

    def absent(self, module: nn.Module) -> nn.Module:
        return Absent(module, self.hidden_size)

    def check_tensor(self, sequence_parallel: bool) -> None:
        if self.structure.tensor.missing:
            raise Refused(f"no tensor-parallel split: {self.structure.tensor.missing}")
        super().check_tensor(sequence_parallel)

    def tensor_plan(self, sequence_parallel: bool) -> dict[str, ParallelStyle]:
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            SequenceParallel,
        )

        plan, of_model = super().tensor_plan(sequence_parallel), self.structure.tensor
        for path in of_model.gathered:
            plan[path] = (
                ColwiseParallel(output_layouts=Replicate())
                if path in self.by_column
                else RowwiseParallel(input_layouts=Replicate())
            )
        of_heads = SequenceParallel(sequence_dim=HEADS, use_local_output=True)
        return plan | dict.fromkeys(of_model.heads, of_heads)


class Absent(nn.Identity):
    """Placeholder for another stage's module: returns hidden states unchanged, and zeros for
    ids."""

    def __init__(self, module: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        for name, value in vars(module).items():
            if isinstance(value, str | bool | int) and not hasattr(self, name):
                setattr(self, name, value)  # e.g. a layer's kind of attention

    def forward(self, input: Tensor, *_: object, **__: object) -> Tensor:
        if input.is_floating_point():
            return input
        return torch.zeros(*input.shape, self.hidden_size, device=input.device)


def _hidden(output: object) -> Tensor:
    hidden = output[0] if isinstance(output, tuple) else output
    assert isinstance(hidden, Tensor)
    return hidden
