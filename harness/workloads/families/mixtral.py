"""Mixtral: Llama's architecture with a mixture of experts in place of each MLP."""

from __future__ import annotations

from harness.workloads.families.llama import LlamaSplit
from harness.workloads.family import Family, ModelConfig


class MixtureSplit(LlamaSplit):
    """Llama's split without tensor parallelism, because experts are three-dimensional
    parameters."""

    by_column = ()
    by_row = ()
    mixture = "mlp"
    sequence_parallel = False


def mixture_size(layers: int, hidden: int, heads: int, feed_forward: int) -> ModelConfig:
    """Returns shared config entries; `feed_forward`: intermediate size of one expert."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_experts_per_tok": 2,
        "intermediate_size": feed_forward,
        "vocab_size": 256,
        "max_position_embeddings": 256,
    }


MIXTURE_COMMON: ModelConfig = {
    "attention_dropout": 0.0,
    "use_cache": False,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    # Only cells with `balance_weight` have the routers' balancing loss.
    "output_router_logits": False,
    "router_aux_loss_coef": 0.0,
}


def _size(layers: int, hidden: int, heads: int, experts: int, feed_forward: int) -> ModelConfig:
    return mixture_size(layers, hidden, heads, feed_forward) | {"num_local_experts": experts}


FAMILY = Family(
    name="mixtral",
    kind="causal",
    config_class="MixtralConfig",
    model_class="MixtralForCausalLM",
    sizes={
        "nano": _size(2, 32, 2, 4, 48),
        "micro": _size(4, 128, 4, 8, 96),
        "mini": _size(4, 256, 4, 8, 192),
        "8x7b": _size(32, 4096, 32, 8, 14336)
        | {"num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096},
    },
    common=MIXTURE_COMMON | {"sliding_window": None, "router_jitter_noise": 0.0},
    split=MixtureSplit(),
)
