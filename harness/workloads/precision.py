"""Casts models to another dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def halve(model: nn.Module, dtype: torch.dtype, keep_batch_norm: bool) -> None:
    """Casts the parameters, in place, and all later inputs of the model to `dtype`.

    `keep_batch_norm` leaves BatchNorm layers unchanged. Otherwise their buffers are cast too,
    because they need the parameters' dtype; other buffers are not.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    for module in model.modules():
        if not isinstance(module, _BatchNorm):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
        elif not keep_batch_norm:
            module.to(dtype)

    def cast(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)

    model.register_forward_pre_hook(cast)
