"""Float8 matrix products by torchao, with one scale per row and per column (recipe `rowwise`).

Weights, gradients and optimizer state stay fp32. Kernels return products in bf16, which torchao
casts to fp32 if requested; emulated products are computed in fp32.

The recipe `tensorwise` has one scale for all samples of a rank, so a sample's rounding depends on
its neighbours. Training on several ranks would then differ from training in one process.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from harness.host.gpu import visible_gpus
from harness.host.hidden_packages import show
from harness.spec.cell import Cell
from harness.workloads.matrices import matrices

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

FIRST_CAPABILITY = (9, 0)
"""Compute capability from which CUDA devices (Hopper) support rowwise scales in torch's
`_scaled_mm`."""


def has_float8(device: torch.device) -> bool:
    """Returns whether the device has float8 products; others emulate them."""
    import torch

    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def use_float8(model: PreTrainedModel) -> None:
    """Makes every attention and MLP matrix compute in float8, in place."""
    show("torchao")
    logging.getLogger("torchao").setLevel(logging.ERROR)  # warns of missing kernels
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    chosen = {name for name, _ in matrices(model)}
    device = next(model.parameters()).device
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name("rowwise"), emulate=not has_float8(device)
    )

    def computes(_: Any, name: str) -> bool:
        return name in chosen

    convert_to_float8_training(model, config=config, module_filter_fn=computes)


def emulated(cell: Cell) -> str | None:
    """Returns a note if a cell's float8 products are emulated; None if its device has them."""
    if cell.device == "cuda":  # by NVML: this process leaves CUDA alone
        capabilities = [gpu.capability for gpu in visible_gpus()]
        if capabilities and (capabilities[0] or (0, 0)) >= FIRST_CAPABILITY:
            return None
    return "float8 products are emulated: their rounding is real, their speed is not"
