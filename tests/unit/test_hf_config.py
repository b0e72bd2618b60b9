"""Parameter counts from config.json equal those of the model that transformers builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from harness.planner.cluster.hf_config import SIZES, TEXT_SIZES, parse_shape
from harness.planner.cluster.model_shape import ModelShape

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 160,
}
LLAMA = SMALL | {"num_key_value_heads": 2, "intermediate_size": 176}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", LLAMA),
    ("llama", LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", LLAMA),
    ("mixtral", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("granite", LLAMA),
    ("phi3", LLAMA | {"pad_token_id": 0}),
    ("olmo2", LLAMA),
    ("olmoe", LLAMA | EXPERTS),
    ("qwen2", LLAMA),
    ("qwen3", LLAMA | {"head_dim": 32}),
    ("qwen3_moe", LLAMA | EXPERTS | {"head_dim": 32, "moe_intermediate_size": 48}),
    ("opt", SMALL | {"ffn_dim": 176, "word_embed_proj_dim": 64, "max_position_embeddings": 128}),
    ("falcon", SMALL | {"multi_query": False, "bias": True, "parallel_attn": False}),
    ("falcon", SMALL | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("gpt_neox", SMALL | {"intermediate_size": 176}),
    ("phi", SMALL | {"intermediate_size": 176}),
    ("starcoder2", LLAMA),
    ("bloom", {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 160}),
]
DEFAULTS = (
    *("gemma", "gemma2", "gemma3_text", "gpt2", "falcon", "qwen2_moe", "deepseek_v2"),
    *("deepseek_v3", "jamba", "zamba", "granitemoehybrid", "bamba", "cohere", "stablelm", "gptj"),
    *("gpt_oss", "mixtral", "opt"),
)
"""Model types tested at the default sizes of their config classes."""
GEMMA_3: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
"""Published config of Gemma 3 4B; heads and vocabulary are transformers' defaults."""
LLAVA: dict[str, Any] = {
    "model_type": "llava",
    "text_config": {"model_type": "llama", "vocab_size": 32064, "rms_norm_eps": 1e-05},
    "tie_word_embeddings": False,
}
INTERN_VL: dict[str, Any] = {
    "model_type": "internvl",
    "text_config": LLAMA | {"model_type": "qwen2"},
}
BLOOM: dict[str, Any] = {
    "model_type": "bloom",
    "n_embed": 1024,
    "n_inner": None,
    "n_layer": 24,
    "num_attention_heads": 16,
    "vocab_size": 250880,
}
"""Published config of BLOOM 560M."""
VISION = [("Qwen2_5_VL", "qwen2_5_vl"), ("Qwen3VL", "qwen3_vl"), ("Qwen3VLMoe", "qwen3_vl_moe")]


@pytest.mark.parametrize(("kind", "sizes"), [*CONFIGS, *((kind, {}) for kind in DEFAULTS)])
def test_counts_are_exact(kind: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **sizes)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert parse_shape(f"hf:{tmp_path}").parameters == model.num_parameters()


def read_with_and_without_torch(config: dict[str, Any], folder: Path) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(config))
    shape = parse_shape(f"hf:{folder}")
    with mock.patch("harness.planner.cluster.hf_config.is_installed", return_value=False):
        assert parse_shape(f"hf:{folder}") == shape
    return shape


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (GEMMA_3, 3_880_263_168),
        (LLAVA, 6_738_939_904),
        (BLOOM, 559_214_592),
        (INTERN_VL, 159_552),
        (INTERN_VL | {"tie_word_embeddings": True}, 149_312),
    ],
)
def test_published_configs_give_the_published_sizes(
    config: dict[str, Any], parameters: int, tmp_path: Path
) -> None:
    shape = read_with_and_without_torch(config, tmp_path)
    assert shape.parameters == parameters
    assert ("(text model" in shape.name) == ("text_config" in config)


def test_sizes_that_a_text_config_omits_are_transformers_defaults(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for kind, sizes in TEXT_SIZES.items():
        config = transformers.AutoConfig.for_model(kind)
        for name, size in zip(SIZES, sizes, strict=False):
            assert not size or getattr(config, name) == size, (kind, name)
        nested = {"model_type": "internvl", "text_config": {"model_type": kind}}
        shape = read_with_and_without_torch(nested, tmp_path)
        config.save_pretrained(tmp_path)
        whole = parse_shape(f"hf:{tmp_path}")
        assert shape.parameters == whole.parameters, kind
        assert (shape.kv_heads, shape.head_size) == (whole.kv_heads, whole.head_size)


@pytest.mark.parametrize(("name", "kind"), VISION)
def test_text_models_of_vision_models_are_counted_exactly(
    name: str, kind: str, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    experts = EXPERTS | {"moe_intermediate_size": 48}
    sizes = LLAMA | {"head_dim": 16} | (experts if "moe" in kind else {})
    config = transformers.AutoConfig.for_model(kind, text_config=sizes)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    counted = {id(p): p.numel() for p in model.model.language_model.parameters()}
    counted |= {id(p): p.numel() for p in model.lm_head.parameters()}
    assert parse_shape(f"hf:{tmp_path}").parameters == sum(counted.values())


@pytest.mark.parametrize(
    ("kind", "entries", "shared"),
    [
        ("qwen2_moe", {"num_experts": 4, "moe_intermediate_size": 48}, 5632),
        ("deepseek_v3", {"n_shared_experts": 2, "moe_intermediate_size": 48}, 96),
        ("qwen3_next", {"shared_expert_intermediate_size": 80}, 80),
        ("mixtral", {}, 0),
    ],
)
def test_widths_of_shared_experts_are_read(
    kind: str, entries: dict[str, Any], shared: int, tmp_path: Path
) -> None:
    config = LLAMA | {"model_type": kind, "num_experts": 4} | entries
    (tmp_path / "config.json").write_text(json.dumps(config))
    with mock.patch("harness.planner.cluster.hf_config.is_installed", return_value=False):
        assert parse_shape(f"hf:{tmp_path}").shared_feed_forward == shared


@pytest.mark.parametrize(
    ("norm", "activation", "gated"),
    [
        ("rms_norm_eps", "gelu_pytorch_tanh", True),
        ("rms_norm_eps", "relu2", False),
        ("layer_norm_eps", "gelu_pytorch_tanh", False),
        ("layer_norm_eps", "swiglu", True),
    ],
)
def test_gates_of_an_unknown_type_are_guessed_without_transformers(
    tmp_path: Path, norm: str, activation: str, gated: bool
) -> None:
    config = LLAMA | {"model_type": "newer", "hidden_act": activation, norm: 1e-6}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with mock.patch("harness.planner.cluster.hf_config.is_installed", return_value=False):
        assert parse_shape(f"hf:{file}").gated == gated
