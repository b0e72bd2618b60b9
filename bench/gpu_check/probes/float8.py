"""Which output types do float8 products with a scale per row support?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bench.gpu_check.probes.finding import Attempt, Finding, attempt

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LARGEST = 448.0
"""Largest value of float8_e4m3fn."""
LARGEST_ERROR = 0.1


@dataclass(frozen=True)
class Float8Facts:
    """Relative error of the product, or why there is none, by output type."""

    errors: tuple[Attempt, ...]


def probe(device: str) -> Finding:
    import torch

    torch.manual_seed(0)
    left, right = torch.randn(64, 128, device=device), torch.randn(32, 128, device=device)
    exact = left @ right.t()
    quantised_left, scale_left = _quantise(left)
    quantised_right, scale_right = _quantise(right)

    def error(dtype: torch.dtype) -> float:
        product = torch._scaled_mm(
            quantised_left,
            quantised_right.t(),
            scale_a=scale_left,
            scale_b=scale_right.t(),
            out_dtype=dtype,
            use_fast_accum=device == "cuda",
        )
        return float((product.float() - exact).norm() / exact.norm())

    types = (torch.bfloat16, torch.float32, torch.float16)
    errors = tuple(attempt(str(t), partial(error, t)) for t in types)
    bf16 = errors[0]
    holds = not bf16.error and float(bf16.answer) < LARGEST_ERROR
    if bf16.error and device == "cpu":
        return Finding("not checked", f"this CPU has no such product: {bf16.error}")
    reason = "; ".join(
        f"{one.name} {one.error or f'error {float(one.answer):.3f}'}" for one in errors
    )
    return Finding.of(holds, reason, Float8Facts(errors))


def _quantise(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the float8 tensor and each row's scale."""
    import torch

    scale = tensor.abs().amax(1, keepdim=True).float() / LARGEST
    return (tensor / scale).to(torch.float8_e4m3fn), scale
