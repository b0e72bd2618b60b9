"""Matrix products in eight bits by torchao: each row of the one factor and each column of the other
has its own scale (recipe `rowwise`). Weights, gradients and optimizer stay fp32. Kernels return
the products in bf16, which torchao casts back to fp32 where that was asked for; emulated ones are
computed in fp32.

The recipe `tensorwise` has one scale for all samples of a rank, so that the rounding of a sample
depends on which others are on its rank: no training on several ranks is then that of one process.
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
"""Of a CUDA device: rowwise scales are of Hopper and later (torch's `_scaled_mm`)."""


def has_float8(device: torch.device) -> bool:
    """Whether the device computes such products; others emulate them."""
    import torch

    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def use_float8(model: PreTrainedModel) -> None:
    """Lets every attention and MLP matrix compute in float8, in place."""
    show("torchao")
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it lacks kernels for other devices
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
    """What a cell of a float8 workload runs in place of float8 products; None where its device has
    them."""
    if cell.device == "cuda":  # by NVML: this process leaves CUDA alone
        capabilities = [gpu.capability for gpu in visible_gpus()]
        if capabilities and (capabilities[0] or (0, 0)) >= FIRST_CAPABILITY:
            return None
    return "float8 products are emulated: their rounding is real, their speed is not"
