"""How many floating-point operations does a model need?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def model_flops(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """FLOPs of `forward` and its backward; the model may be made of tensors without memory
    (FakeTensorMode)."""
    from torch.utils.flop_counter import FlopCounterMode

    config: Any = getattr(model, "config", None)
    if hasattr(config, "_attn_implementation"):
        # Fused attention is not in the counter's list on every device.
        config._attn_implementation = "eager"
    with FlopCounterMode(display=False) as counter:
        forward().sum().backward()
    return int(counter.get_total_flops())
