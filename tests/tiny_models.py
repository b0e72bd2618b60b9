"""Tiny configs of transformers' models, saved as a user's folder has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_DECODER: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_ENCODER: dict[str, Any] = {
    name: _DECODER[name]
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _DECODER | {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", _DECODER),
    "qwen3": ("Qwen3ForCausalLM", _DECODER | {"tie_word_embeddings": True}),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        _DECODER | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "mistral": ("MistralForCausalLM", _DECODER | {"sliding_window": 8}),
    "phi": ("PhiForCausalLM", _DECODER | {"num_key_value_heads": 4}),
    "phi3": ("Phi3ForCausalLM", _DECODER),
    "mixtral": ("MixtralForCausalLM", _DECODER | {"num_local_experts": 4, "sliding_window": 8}),
    "mamba": (
        "MambaForCausalLM",
        {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    ),
    "falcon": ("FalconForCausalLM", _ENCODER),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 256, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8},
    ),
    "vit": (
        "ViTForImageClassification",
        {**_ENCODER, "image_size": 32, "patch_size": 8, "num_labels": 10},
    ),
    "roberta": ("RobertaForMaskedLM", _ENCODER | {"max_position_embeddings": 514}),
    "deberta-v2": (
        "DebertaV2ForTokenClassification",
        _ENCODER
        | {
            "num_labels": 5,
            "relative_attention": True,
            "position_buckets": 16,
            "pos_att_type": ["p2c", "c2p"],
        },
    ),
}


def save_config(folder: Path, model_type: str, architecture: str = "", **changes: Any) -> str:
    """Saves one of MODELS, with changes, without weights; returns the workload's name."""
    from transformers import AutoConfig

    named, config = MODELS[model_type]
    saved = AutoConfig.for_model(model_type, **config | changes)
    saved.architectures = [architecture or named]
    saved.save_pretrained(folder)
    return f"hf:{folder}"
