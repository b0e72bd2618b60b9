"""GPT-2 (tied embeddings, learned positions, fused query-key-value as Conv1D)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.workloads.family import Family, ModelConfig, SplitByParts

if TYPE_CHECKING:
    from torch import Tensor, nn


class Gpt2Split(SplitByParts):
    blocks = "transformer.h"
    embedding = ("transformer.wte", "transformer.wpe")
    head = ("transformer.ln_f", "lm_head")
    by_column = ("transformer.h.*.attn.c_attn", "transformer.h.*.mlp.c_fc")
    by_row = ("transformer.h.*.attn.c_proj", "transformer.h.*.mlp.c_proj")

    def embed(self, model: nn.Module, inputs: Tensor) -> Tensor:
        import torch

        positions = torch.arange(inputs.shape[1], device=inputs.device)
        of_tokens = model.get_submodule("transformer.wte")(inputs)
        hidden = of_tokens + model.get_submodule("transformer.wpe")(positions)[None]
        dropped: Tensor = model.get_submodule("transformer.drop")(hidden)
        return dropped

    def output(self, model: nn.Module, hidden: Tensor) -> Tensor:
        normed = model.get_submodule("transformer.ln_f")(hidden)
        logits: Tensor = model.get_submodule("lm_head")(normed)
        return logits

    def prepare_tensor(self, model: nn.Module, size: int) -> dict[str, Callable[[Tensor], Tensor]]:
        """Replaces each Conv1D, whose weight is (inputs, outputs), with a Linear. Reorders fused
        query, key and value rows, so that an even split gives a rank the same heads of all
        three."""
        import torch
        from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
        from transformers.pytorch_utils import Conv1D

        restore: dict[str, Callable[[Tensor], Tensor]] = {}
        for name, conv in [(n, m) for n, m in model.named_modules() if isinstance(m, Conv1D)]:
            linear = torch.nn.Linear(
                conv.weight.shape[0], conv.weight.shape[1], device=conv.weight.device
            )
            weight, bias = conv.weight.data.t(), conv.bias.data
            parent = model.get_submodule(name.rpartition(".")[0])
            undo: Callable[[Tensor], Tensor] = _unchanged
            if name.endswith("c_attn"):
                weight, bias = _reorder(weight, 3, size), _reorder(bias, 3, size)
                undo = functools.partial(_reorder, outer=size, inner=3)
                assert isinstance(parent, GPT2Attention)
                parent.split_size //= size
            linear.weight.data, linear.bias.data = weight.contiguous(), bias.contiguous()
            setattr(parent, name.rpartition(".")[2], linear)
            restore[f"{name}.weight"] = functools.partial(_transposed, undo)
            restore[f"{name}.bias"] = undo
        return restore


def _unchanged(rows: Tensor) -> Tensor:
    return rows


def _transposed(undo: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    return undo(rows).t()


def _reorder(rows: Tensor, outer: int, inner: int) -> Tensor:
    """Reorders rows numbered (outer, inner, rest) to (inner, outer, rest)."""
    reordered: Tensor = rows.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)
    return reordered


def _without_key_bias(name: str, tensor: Tensor) -> Tensor:
    """See harness/workloads/families/bert.py."""
    if not name.endswith("attn.c_attn.bias"):
        return tensor
    import torch

    query, _, value = tensor.chunk(3)
    return torch.cat([query, value])


def _size(
    layers: int, hidden: int, heads: int, vocabulary: int = 50257, positions: int = 1024
) -> ModelConfig:
    return {
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "vocab_size": vocabulary,
        "n_positions": positions,
    }


FAMILY = Family(
    name="gpt2",
    kind="causal",
    config_class="GPT2Config",
    model_class="GPT2LMHeadModel",
    sizes={
        "nano": _size(2, 32, 2, 256, 256),
        "micro": _size(4, 128, 4, 256, 256),
        "mini": _size(4, 256, 4, 256, 256),
        "slim": _size(8, 256, 8, 256, 256),
        "small": _size(12, 768, 12),
        "medium": _size(24, 1024, 16),
        "large": _size(36, 1280, 20),
        "xl": _size(48, 1600, 25),
    },
    common={
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    split=Gpt2Split({"lm_head.weight": "transformer.wte.weight"}),
    dropouts=(
        "transformer.drop",
        "transformer.h.*.attn.resid_dropout",
        "transformer.h.*.mlp.dropout",
    ),
    hidden_size_key="n_embd",
    without_zero_gradient=_without_key_bias,
)
