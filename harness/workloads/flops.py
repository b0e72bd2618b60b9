"""How many floating-point operations does a model need?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


def model_flops(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Floating-point operations of `forward` and its backward, by torch's FlopCounterMode: those of
    matrix multiplications, convolutions and attention, a multiply-add being two.

    `forward` calls `model`, whose tensors may have no memory (FakeTensorMode).
    """
    from torch.utils.flop_counter import FlopCounterMode

    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "_attn_implementation"):
        # The counter does not know the operators of fused attention on every device.
        config._attn_implementation = "eager"
    with FlopCounterMode(display=False) as counter:
        forward().sum().backward()
    return int(counter.get_total_flops())
