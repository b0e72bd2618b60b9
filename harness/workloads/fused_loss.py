"""Losses that make no whole logits, or no fp32 copies of them.

The head computes such a loss itself, so that wrappers gather its weight for it. Chunks must be
summed and divided once: a mean of chunks' means is wrong if their labels differ in number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.workloads import Workload

IN_HEAD = ("torch_linear", "liger_linear")
"""Losses that the head computes from hidden states."""


class FusedHead:
    """Replaces a head's forward, in place: hidden states and `labels` become the loss."""

    def __init__(self, kind: str, head: nn.Linear) -> None:
        self.kind, self.head = kind, head
        self.labels: Tensor | None = None
        self.label_tokens: float | None = None
        head.forward = self.forward  # type: ignore[method-assign, assignment]

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps hidden states (samples, tokens, hidden) to the mean loss of the labelled tokens, or
        to the sum of losses over `label_tokens`."""
        assert self.labels is not None
        rows, targets, weight = hidden.flatten(0, -2), self.labels.flatten(), self.head.weight
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            half = torch.get_autocast_dtype(device)
            rows, weight = rows.to(half), weight.to(half)
        reduction = "mean" if self.label_tokens is None else "sum"
        if self.kind == "liger_linear":
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            loss: Tensor = LigerFusedLinearCrossEntropyLoss(reduction=reduction)(
                weight, rows, targets, self.head.bias
            )
        else:
            loss = _by_torch(rows, weight, targets, self.head.bias, reduction)
        return loss if self.label_tokens is None else loss / self.label_tokens


def _by_torch(
    rows: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, reduction: str
) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    held = None
    if isinstance(rows, FakeTensor):
        # Fake kernels allocate only results. Real ones also hold a chunk's logits and, for half
        # precision on CPUs, the weight and its gradient in fp32.
        size, (classes, features) = len(rows), weight.shape
        chosen = options._adjust(size, features, classes, rows.dtype, rows.device)
        casts = 2 * weight.numel() if rows.dtype != chosen.acc_dtype else 0
        elements = chosen.batch_chunk_size * classes + casts
        held = rows.new_empty(elements, dtype=chosen.acc_dtype)
    loss = F.linear_cross_entropy(
        rows, weight, targets, linear_bias=bias, reduction=reduction, options=options
    )
    del held
    return loss


def fused_head(model: nn.Module, kind: str) -> FusedHead | None:
    """Makes a transformers model return its loss instead of logits, in place. Returns the head,
    which needs each batch's labels; None for losses of logits."""
    if kind not in IN_HEAD:
        return None
    return FusedHead(kind, model.get_output_embeddings())  # type: ignore[operator]


def loss_of(
    kind: str, workload: Workload, output: Tensor, labels: Tensor, label_tokens: float | None
) -> Tensor:
    """Returns the loss of logits (samples, tokens, vocabulary), or the one that the head computed.
    See `Workload.loss`."""
    if kind in IN_HEAD:
        return output
    if kind == "plain":
        return workload.loss(output, labels, label_tokens)
    from deepspeed.runtime.chunked_cross_entropy import chunked_cross_entropy

    reduction = "mean" if label_tokens is None else "sum"
    loss: Tensor = chunked_cross_entropy(
        output.flatten(0, -2), labels.flatten(), reduction=reduction
    )
    return loss if label_tokens is None else loss / label_tokens
