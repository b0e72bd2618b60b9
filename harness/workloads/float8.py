"""Float8 matrix products by torchao, with one scale per row and per column (recipe `rowwise`).

Weights, gradients and optimizer state stay fp32. Kernels return bf16, which torchao casts to fp32
if requested; emulated products are computed in fp32. The recipe `tensorwise` has one scale for all
samples of a rank, so training would depend on the number of ranks.
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
"""Lowest CUDA compute capability with rowwise scales in torch's `_scaled_mm` (Hopper)."""


def has_float8(device: torch.device) -> bool:
    import torch

    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def use_float8(model: PreTrainedModel) -> None:
    """Makes all attention and MLP matrices compute in float8, in place."""
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
    """Returns a note if a cell's device must emulate float8, else None."""
    if cell.device == "cuda":  # by NVML: this process leaves CUDA alone
        capabilities = [gpu.capability for gpu in visible_gpus()]
        if capabilities and (capabilities[0] or (0, 0)) >= FIRST_CAPABILITY:
            return None
    return "float8 products are emulated: their rounding is real, their speed is not"
