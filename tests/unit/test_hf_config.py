"""Parameter counts from config.json equal those of the model that transformers builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.planner.cluster.model_names import parse_shape
from harness.workloads import make_workload
from harness.workloads.counts import model_facts

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 160,
}
LLAMA = SMALL | {"num_key_value_heads": 2, "intermediate_size": 176}
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", LLAMA),
    ("llama", LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", LLAMA),
    ("mixtral", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("granite", LLAMA),
    ("phi3", LLAMA | {"pad_token_id": 0}),
    ("olmo2", LLAMA),
    ("olmoe", LLAMA | {"num_experts": 4, "num_experts_per_tok": 2}),
    ("qwen2", LLAMA),
    (
        "qwen2_moe",
        LLAMA
        | {"num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80},
    ),
    ("qwen3", LLAMA | {"head_dim": 32}),
    (
        "qwen3_moe",
        LLAMA
        | {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
        },
    ),
    ("gemma", LLAMA | {"head_dim": 32}),
    ("gemma2", LLAMA | {"head_dim": 32}),
    ("gemma3_text", LLAMA | {"head_dim": 32}),
    ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 160, "n_positions": 128}),
    ("opt", SMALL | {"ffn_dim": 176, "word_embed_proj_dim": 64, "max_position_embeddings": 128}),
    ("falcon", SMALL),
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


@pytest.mark.parametrize(("kind", "sizes"), [*CONFIGS, *((kind, {}) for kind in DEFAULTS)])
def test_counts_are_exact(kind: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **sizes)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert parse_shape(f"hf:{tmp_path}").parameters == model.num_parameters()


@pytest.mark.parametrize("name", ["llama-1b", "llama-7b"])
def test_a_planned_model_is_the_workload_of_its_name(name: str) -> None:
    facts = model_facts(make_workload(name), 8)
    assert parse_shape(name).parameters == facts.parameters
