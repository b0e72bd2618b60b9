"""Weights in 8 or 4 bits by bitsandbytes: LLM.int8() (arXiv 2208.07339), and NF4 as in QLoRA (arXiv
2305.14314)."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from harness.workloads.matrices import features, matrices

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel
    from transformers.pytorch_utils import Conv1D

    from harness.spec.training import Retained

_NF4_BLOCK = 64
"""Weights per scale."""
_NF4_VALUES = 16
"""Values of a 4-bit weight."""
_OUTLIERS = 6.0
"""Inputs above this are multiplied in half precision (LLM.int8(), section 3.2)."""


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
    """Returns the bytes of the quantised matrix and of its fp32 scales and code book."""
    elements = matrix.weight.numel()
    if storage == "int8":
        return elements, 4 * features(matrix)[1]
    return -(-elements // 2), 4 * -(-elements // _NF4_BLOCK) + 4 * _NF4_VALUES


def quantise(model: PreTrainedModel, storage: str) -> None:
    """Replaces all attention and MLP matrices with bitsandbytes' layers, in place and on their
    device.

    `storage`: `int8` or `nf4`.
    """
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


def scales(model: nn.Module) -> Iterator[Retained]:
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if (nf4 := getattr(weight, "quant_state", None)) is not None:
            yield "library", "scales of nf4 weights", nf4.absmax
            yield "library", "code book of nf4", nf4.code
        # The int8 layer moves the scales from its weight to its state in the first forward.
        for holder in (weight, getattr(module, "state", None)):
            if (int8 := getattr(holder, "SCB", None)) is not None:
                yield "library", "scales of int8 weights", int8
