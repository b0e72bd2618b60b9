"""Qwen3-MoE: Mixtral's architecture with query and key norms."""

from __future__ import annotations

from harness.workloads.families.mixtral import MIXTURE_COMMON, MixtureSplit, mixture_size
from harness.workloads.family import Family, ModelConfig


def _size(layers: int, hidden: int, heads: int, experts: int, feed_forward: int) -> ModelConfig:
    return mixture_size(layers, hidden, heads, feed_forward) | {
        "head_dim": hidden // heads,
        "num_experts": experts,
        "moe_intermediate_size": feed_forward,
    }


FAMILY = Family(
    name="qwen3-moe",
    kind="causal",
    config_class="Qwen3MoeConfig",
    model_class="Qwen3MoeForCausalLM",
    sizes={
        "nano": _size(2, 32, 2, 4, 48),
        "micro": _size(4, 128, 4, 8, 96),
        "mini": _size(4, 256, 4, 8, 192),
        "30b": _size(48, 2048, 32, 128, 768)
        | {
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
            "max_position_embeddings": 4096,
        },
    },
    common=MIXTURE_COMMON | {"norm_topk_prob": True},
    split=MixtureSplit(),
)
