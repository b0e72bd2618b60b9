"""Llama (untied embeddings, rotary positions, no biases)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.cell.errors import UsageError
from harness.workloads.family import Family, ModelConfig, SplitByParts

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.tensor.parallel import ParallelStyle


class LlamaSplit(SplitByParts):
    blocks = "model.layers"
    embedding = ("model.embed_tokens",)
    head = ("model.norm", "lm_head")
    by_column: tuple[str, ...] = (
        *(f"model.layers.*.self_attn.{n}_proj" for n in "qkv"),
        *(f"model.layers.*.mlp.{n}_proj" for n in ("gate", "up")),
    )
    by_row: tuple[str, ...] = ("model.layers.*.self_attn.o_proj", "model.layers.*.mlp.down_proj")
    sequence_parallel = True
    by_vocabulary = ("model.embed_tokens", "lm_head")

    def embed(self, model: nn.Module, inputs: Tensor) -> Tensor:
        hidden: Tensor = model.get_submodule("model.embed_tokens")(inputs)
        return hidden

    def block(self, model: nn.Module, block: nn.Module, hidden: Tensor, tokens: int) -> Tensor:
        import torch

        positions = torch.arange(tokens, device=hidden.device)[None]
        rotations = model.get_submodule("model.rotary_emb")(hidden, positions)
        output: Tensor = block(hidden, position_embeddings=rotations)
        return output

    def output(self, model: nn.Module, hidden: Tensor) -> Tensor:
        normed = model.get_submodule("model.norm")(hidden)
        logits: Tensor = model.get_submodule("lm_head")(normed)
        return logits

    def tensor_plan(self, sequence_parallel: bool) -> dict[str, ParallelStyle]:
        plan = super().tensor_plan(sequence_parallel)
        if not sequence_parallel:
            return plan
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            SequenceParallel,
        )

        return plan | {
            **{row: RowwiseParallel(output_layouts=Shard(1)) for row in self.by_row},
            "model.embed_tokens": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1)
            ),
            "model.layers.*.input_layernorm": SequenceParallel(),
            "model.layers.*.post_attention_layernorm": SequenceParallel(),
            "model.layers.*.self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            ),
            "model.layers.*.mlp": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }


def _size(
    layers: int,
    hidden: int,
    heads: int,
    feed_forward: int,
    key_values: int = 0,
    vocabulary: int = 256,
    positions: int = 256,
) -> ModelConfig:
    """Returns the config of a named size. `key_values`: number of key and value heads, fewer than
    query heads in grouped-query attention; 0 means as many as query heads."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": key_values or heads,
        "intermediate_size": feed_forward,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
    }


def _sized(hidden: int, layers: int) -> ModelConfig:
    """Returns the config of a size; raises UsageError unless `hidden` is a multiple of 64.

    The feed-forward size is 8/3 of it (arXiv 2302.13971, section 2.2), rounded up to a multiple of
    64.
    """
    if hidden % 64:
        raise UsageError(
            f"workload llama-{hidden}x{layers}: the hidden size must be a multiple of 64, the size"
            " of a head"
        )
    return _size(layers, hidden, hidden // 64, -(-hidden * 8 // 3 // 64) * 64, positions=2**20)


FAMILY = Family(
    name="llama",
    kind="causal",
    config_class="LlamaConfig",
    model_class="LlamaForCausalLM",
    sizes={
        "nano": _size(2, 32, 2, 96),
        "micro": _size(4, 128, 4, 352),
        "mini": _size(4, 256, 4, 704),
        "small": _size(12, 768, 12, 2048, vocabulary=32000, positions=2048),
        "1b": _size(16, 2048, 32, 8192, 8, vocabulary=32000, positions=4096),
        "3b": _size(28, 3072, 24, 8192, 8, vocabulary=32000, positions=4096),
        "7b": _size(32, 4096, 32, 11008, vocabulary=32000, positions=4096),
        "8b": _size(32, 4096, 32, 14336, 8, vocabulary=128256, positions=8192),
    },
    common={
        "attention_dropout": 0.0,
        "use_cache": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    split=LlamaSplit(),
    sized=_sized,
)
