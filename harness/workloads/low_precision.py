"""Low-precision weights and arithmetic: half, float8, and quantised.

`int8` and `nf4`: bitsandbytes' LLM.int8() (arXiv 2208.07339) and QLoRA's NF4 (arXiv 2305.14314).
`float8`: torchao's recipe `rowwise`, a scale per row and column. With one scale for all samples of
a rank (`tensorwise`), training would depend on the number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from harness.cell.cell import Cell
from harness.host.amd import rocm_version
from harness.host.gpu_inventory import visible_gpus
from harness.host.packages import show

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel
    from transformers.pytorch_utils import Conv1D

    from harness.cell.training import Retained

_NF4_BLOCK = 64
"""Number of weights that share a scale."""
_NF4_VALUES = 16
"""Number of values that a 4-bit weight can take."""
_OUTLIERS = 6.0
"""Size of an input above which its feature is multiplied in half precision (LLM.int8(), section
3.2)."""
FIRST_CAPABILITY = (9, 0)
"""Minimum CUDA capability for rowwise scales in torch's `_scaled_mm` (Hopper)."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences warnings of peft (a deprecated name) and bitsandbytes (faster kernels)."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logger.setLevel(level)


def quantised_bytes(matrix: nn.Linear | Conv1D, storage: str) -> tuple[int, int]:
    """Returns bytes of the quantised matrix, and of its fp32 scales and code book."""
    elements = matrix.weight.numel()
    if storage == "int8":
        return elements, 4 * features(matrix)[1]
    return -(-elements // 2), 4 * -(-elements // _NF4_BLOCK) + 4 * _NF4_VALUES


def quantise(model: PreTrainedModel, storage: str) -> None:
    """Replaces attention and MLP matrices with bitsandbytes' `int8` or `nf4` layers, in place."""
    for name, matrix in matrices(model):
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, _quantised(matrix, storage))
    # This attribute makes peft use its layers for quantised weights.
    model.__dict__["is_loaded_in_4bit" if storage == "nf4" else "is_loaded_in_8bit"] = True


def _quantised(matrix: nn.Linear | Conv1D, storage: str) -> nn.Module:
    with quiet():
        import bitsandbytes
    from torch import nn

    layers: Any = bitsandbytes.nn  # only partly typed

    inputs, outputs = features(matrix)
    device = matrix.weight.device
    weight = matrix.weight.detach()
    if not isinstance(matrix, nn.Linear):
        weight = weight.t().contiguous()
    biased = matrix.bias is not None
    layer: nn.Module
    if storage == "nf4":
        nf4 = {"compress_statistics": False, "quant_type": "nf4"}
        layer = layers.Linear4bit(inputs, outputs, biased, device="meta", **nf4)
        layer.weight = layers.Params4bit(weight, False, module=layer, **nf4).to(device)
    else:
        layer = layers.Linear8bitLt(
            inputs, outputs, biased, has_fp16_weights=False, threshold=_OUTLIERS, device="meta"
        )
        # The layer quantises weights only while moving them off the CPU.
        layer.weight = layers.Int8Params(weight.cpu(), False).to(device)
    if biased:
        layer.bias = nn.Parameter(matrix.bias.detach(), requires_grad=False)
    return layer


def store_as_floats(model: nn.Module, dtype: torch.dtype) -> None:
    """Stores packed 4-bit weights in this dtype, in place (bitsandbytes' `quant_storage`).

    FSDP1 shards no integers, FSDP2 none before torch 2.13, and Accelerate 1.15 silently keeps them
    whole (huggingface/accelerate#3983). Casting destroys the weights.
    """
    for module in model.modules():
        if getattr(getattr(module, "weight", None), "quant_state", None) is not None:
            weight = module.get_parameter("weight")
            weight.data = weight.data.flatten().view(dtype).unsqueeze(1)
            weight.__dict__["quant_storage"] = module.__dict__["quant_storage"] = dtype


def scales(model: nn.Module) -> Iterator[Retained]:
    for module in model.modules():
        weight = getattr(module, "weight", None)
        # A sharded weight has lost its state; its module still has it.
        if (
            nf4 := getattr(weight, "quant_state", getattr(module, "quant_state", None))
        ) is not None:
            yield "library", "scales of nf4 weights", nf4.absmax
            yield "library", "code book of nf4", nf4.code
        # In the first forward, the int8 layer moves the scales from its weight to its state.
        for holder in (weight, getattr(module, "state", None)):
            if (int8 := getattr(holder, "SCB", None)) is not None:
                yield "library", "scales of int8 weights", int8


def has_float8(device: torch.device) -> bool:
    import torch

    if device.type != "cuda" or rocm_version():  # AMD numbers capabilities differently
        return False
    return torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def use_float8(model: PreTrainedModel) -> None:
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
    if cell.device == "cuda":  # asks NVML, as this process must not initialise CUDA
        capabilities = [gpu.capability for gpu in visible_gpus()]
        if capabilities and (capabilities[0] or (0, 0)) >= FIRST_CAPABILITY:
            return None
    return "float8 products are emulated: their rounding is real, their speed is not"


def halve(model: nn.Module, dtype: torch.dtype, keep_batch_norm: bool) -> None:
    """Casts a model's parameters, in place, and all later inputs. `keep_batch_norm`: leave
    BatchNorm layers and buffers unchanged."""
    from torch.nn.modules.batchnorm import _BatchNorm

    for module in model.modules():
        if not isinstance(module, _BatchNorm):
            for parameter in module.parameters(recurse=False):
                if parameter.is_floating_point():  # not quantised
                    parameter.data = parameter.data.to(dtype)
        elif not keep_batch_norm:
            module.to(dtype)

    def cast(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)

    model.register_forward_pre_hook(cast)


def matrices(model: PreTrainedModel) -> list[tuple[str, nn.Linear | Conv1D]]:
    """Returns path and module of every linear layer except the one for logits."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    logits = model.get_output_embeddings()
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not logits
    ]


def features(matrix: nn.Linear | Conv1D) -> tuple[int, int]:
    """Returns the numbers of a layer's inputs and outputs. Conv1D stores them in the reverse order
    of Linear."""
    from torch import nn

    rows, columns = matrix.weight.shape
    return (columns, rows) if isinstance(matrix, nn.Linear) else (rows, columns)
