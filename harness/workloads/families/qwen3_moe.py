"""Qwen3-MoE: Llama's architecture with norms of queries and keys, and a mixture of experts in the
place of each MLP."""

from __future__ import annotations

from harness.workloads.families.mixtral import MixtureSplit
from harness.workloads.family import Family, ModelConfig


def _size(layers: int, hidden: int, heads: int, experts: int, feed_forward: int) -> ModelConfig:
    """`feed_forward`: intermediate size of one expert, of which two see each token."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": feed_forward,
        "intermediate_size": feed_forward,
        "vocab_size": 256,
        "max_position_embeddings": 256,
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
    # The router's auxiliary loss is a mean over a rank's own tokens: the mean of ranks is another
    # one than that of a single process.
    common={
        "attention_dropout": 0.0,
        "use_cache": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "norm_topk_prob": True,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
    },
    split=MixtureSplit(),
)
