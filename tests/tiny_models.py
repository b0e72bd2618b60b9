"""Tiny configs of transformers' models, saved like a user's folder."""

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

_BART: dict[str, Any] = {
    "vocab_size": 256,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 256,
}
_WHISPER = _BART | {
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 64,
    "pad_token_id": 0,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 256}
_HYBRID: dict[str, Any] = _DECODER | {
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 64,
}
MORE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "bert": ("BertForMaskedLM", _ENCODER),
    "gemma2": (
        "Gemma2ForCausalLM",
        _DECODER | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", _ENCODER),
    "opt": ("OPTForCausalLM", _ENCODER | {"ffn_dim": 64, "word_embed_proj_dim": 16}),
    "olmo2": ("Olmo2ForCausalLM", _DECODER),
    "granite": ("GraniteForCausalLM", _DECODER),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", _HYBRID),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        _DECODER
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {n: v for n, v in _DECODER.items() if n != "head_dim"}
        | {
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "bloom": (
        "BloomForCausalLM",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 256},
    ),
    "cohere": ("CohereForCausalLM", _DECODER),
    "stablelm": ("StableLmForCausalLM", _DECODER),
    "starcoder2": ("Starcoder2ForCausalLM", _DECODER),
    "bart": ("BartForConditionalGeneration", _BART),
    "pegasus": ("PegasusForConditionalGeneration", _BART),
    "whisper": ("WhisperForConditionalGeneration", _WHISPER),
    "distilbert": (
        "DistilBertForSequenceClassification",
        {"vocab_size": 256, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    ),
    "electra": (
        "ElectraForTokenClassification",
        _ENCODER | {"embedding_size": 16, "num_labels": 5},
    ),
    "albert": ("AlbertForMaskedLM", _ENCODER | {"embedding_size": 16}),
    "modernbert": ("ModernBertForMaskedLM", _ENCODER | {"pad_token_id": 0}),
    "funnel": (
        "FunnelForMaskedLM",
        {"vocab_size": 256, "block_sizes": [2, 1], "num_decoder_layers": 1, "d_model": 32}
        | {"n_head": 4, "d_head": 8, "d_inner": 64},
    ),
    "dinov2": (
        "Dinov2ForImageClassification",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"image_size": 32, "patch_size": 8, "num_labels": 10},
    ),
    "longformer": (
        "LongformerForMaskedLM",
        _ENCODER | {"attention_window": 8, "max_position_embeddings": 256},
    ),
    "resnet": (
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5},
    ),
    "convnext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 64}
        | {"num_labels": 5},
    ),
    "swin": (
        "SwinForImageClassification",
        {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
        | {"image_size": 32, "patch_size": 4, "num_labels": 5},
    ),
}
"""Further models, most of which only thorough tests use."""


def save_config(folder: Path, model_type: str, architecture: str = "", **changes: Any) -> str:
    """Saves a changed config of MODELS or MORE_MODELS, no weights; returns the workload name."""
    from transformers import AutoConfig

    named, config = (MODELS | MORE_MODELS)[model_type]
    saved = AutoConfig.for_model(model_type, **config | changes)
    saved.architectures = [architecture or named]
    saved.save_pretrained(folder)
    return f"hf:{folder}"
