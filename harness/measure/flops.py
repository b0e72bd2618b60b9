"""How many floating-point operations does the model need, and what share of the device's peak is
that?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.measure.peaks import gpu_model

if TYPE_CHECKING:
    from torch import Tensor, nn

FORMULA = (
    "matrix-multiply, convolution and attention FLOPs of one forward and backward of the unsplit"
    " model, 2 per multiply-add, attention over the full square, counted by"
    " torch.utils.flop_counter; recomputation does not count; MFU = FLOPs x steps/s / (devices x"
    " peak of the device in the precision)"
)


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


def peak_flops_per_second(device_name: str | None, precision: str) -> float | None:
    """The data sheet's dense peak of one device; None for a device that is not in the table (every
    CPU)."""
    model = gpu_model(device_name)
    return model.peak_flops_per_second(precision) if model else None


def mfu(
    flops_per_step: float | None, step_seconds: float, devices: int, peak: float | None
) -> float | None:
    """Model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B), a fraction; None where the peak
    is unknown."""
    if flops_per_step is None or peak is None or step_seconds <= 0:
        return None
    return flops_per_step / step_seconds / (devices * peak)
