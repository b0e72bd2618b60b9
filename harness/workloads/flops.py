"""Counts a model's floating-point operations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from unittest import mock

from harness.workloads.recompute import experts_backward, grouped_products

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.autograd.function import BackwardCFunction


def model_flops(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Returns the floating-point operations of `forward` and its backward, by torch's
    FlopCounterMode: matrix products, convolutions and attention, 2 per multiply-add.

    `forward` calls `model`, whose tensors may be fake.
    """
    from torch.utils.flop_counter import FlopCounterMode

    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "_attn_implementation"):
        # The counter does not know fused attention on every device.
        config._attn_implementation = "eager"
    with FlopCounterMode(display=False, custom_mapping=dict(grouped_products())) as counter:
        forward().sum().backward()
    return int(counter.get_total_flops())


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Makes new tensors fake (FakeTensorMode), so that any model from `Workload.countable` can be
    counted.

    Modules stay on their device, because there is no data to move. Experts use transformers'
    grouped product: torch knows the shapes of its own only in bf16. Positions are unreadable, so
    transformers must not look for packed sequences, which would need a mask over all token pairs.
    """
    import torch
    from torch._library.custom_ops import OPDEFS
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import masking_utils
    from transformers.integrations import moe

    experts = OPDEFS["transformers::grouped_mm_fallback"]
    backward = experts._backward_fn if experts_backward() else _without_numbers_of_rows

    def stay(module: nn.Module, *_: object, **__: object) -> nn.Module:
        return module

    with (
        FakeTensorMode(),
        mock.patch.object(torch.nn.Module, "to", stay),
        mock.patch.object(moe, "_can_use_grouped_mm", return_value=False),
        mock.patch.object(experts, "_backward_fn", backward),
        mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None),
    ):
        yield


def _without_numbers_of_rows(
    ctx: BackwardCFunction, gradient: Tensor
) -> tuple[Tensor, Tensor, None]:
    """Gradients of a grouped product in as many operations as transformers computes them in, where
    its own backward would read how many rows each expert has."""
    rows, matrices = tuple(ctx.saved_tensors)
    rows.T @ gradient  # counted; each row has part in the gradient of one matrix
    return gradient @ matrices[0].T, matrices.new_zeros(matrices.shape), None
