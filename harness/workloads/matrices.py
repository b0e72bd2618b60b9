"""Attention and MLP matrices of a transformer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel
    from transformers.pytorch_utils import Conv1D


def matrices(model: PreTrainedModel) -> list[tuple[str, nn.Linear | Conv1D]]:
    """Returns path and module of every linear layer except the one that computes logits."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    logits = model.get_output_embeddings()
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not logits
    ]


def features(matrix: nn.Linear | Conv1D) -> tuple[int, int]:
    """Returns the numbers of inputs and outputs. GPT-2's Conv1D stores (inputs, outputs), Linear
    the reverse."""
    from torch import nn

    rows, columns = matrix.weight.shape
    return (columns, rows) if isinstance(matrix, nn.Linear) else (rows, columns)
