"""Mixtures, hybrids and latent attention: what a shape describes, and that nothing is negative."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from harness.cell.errors import UsageError
from harness.planner.cluster.calibration import load
from harness.planner.cluster.footprint import footprint
from harness.planner.cluster.hardware import cluster_of
from harness.planner.cluster.hf_config import parse_shape
from harness.planner.cluster.model_shape import MOST_UNDESCRIBED, ModelShape
from harness.planner.cluster.prediction import predict
from harness.planner.cluster.question import ClusterQuestion, enumerate_layouts
from harness.planner.cluster.recipe import Adapter, Recipe

QUICK = (
    *("deepseek_v3", "glm4_moe_lite", "lfm2", "granitemoehybrid", "qwen3_next", "jamba", "bamba"),
    *("gpt_oss", "ernie4_5_moe", "nemotron_h", "zamba2", "mpt", "kimi_linear"),
)
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "vocab_size": 102400,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def require_sound(shape: ModelShape) -> None:
    """Fails unless all sizes, bytes and seconds are finite and none is negative."""
    for field in dataclasses.fields(shape):
        value = getattr(shape, field.name)
        assert not isinstance(value, int) or value >= 0, field.name
    assert bool(shape.undescribed) == (shape.other > MOST_UNDESCRIBED * shape.parameters)
    assert shape.layers * shape.layer_parameters <= shape.parameters
    recipes = (
        *(Recipe("bf16", recompute=recompute) for recompute in ("none", "full")),  # type: ignore[arg-type]
        Recipe("bf16", gpus=8, sharding="full", accumulation=4),
        *(Recipe("pure-bf16", Adapter(8), base, gpus=2) for base in ("bf16", "nf4")),  # type: ignore[arg-type]
    )
    for recipe in recipes:
        found = dataclasses.asdict(footprint(shape, recipe))
        assert all(math.isfinite(value) and value >= 0 for value in found.values()), found
    cluster = cluster_of("h100-80gb", 8, "nvlink,400gbit")
    question = ClusterQuestion(shape, cluster, 4096, 64, 16)
    layouts = enumerate_layouts(question)
    layouts = layouts.take(np.arange(0, len(layouts), max(1, len(layouts) // 200)))
    predicted = predict(question, layouts, load())
    memory = dataclasses.asdict(predicted.memory).values()
    for figures in (predicted.seconds, predicted.fits, predicted.half_width, *memory):
        assert np.isfinite(figures).all()
        assert (figures >= 0).all()


def shape_of(kind: str, folder: Path) -> ModelShape:
    transformers = pytest.importorskip("transformers")
    try:
        config = transformers.AutoConfig.for_model(kind)
    except Exception as error:
        pytest.skip(f"transformers has no usual config: {error}")
    config.save_pretrained(folder)
    return parse_shape(f"hf:{folder}")


@pytest.mark.parametrize("kind", QUICK)
def test_hybrids_and_mixtures_are_described(kind: str, tmp_path: Path) -> None:
    shape = shape_of(kind, tmp_path)
    require_sound(shape)
    assert (kind == "zamba2") == bool(shape.undescribed)


@pytest.mark.thorough
def test_every_config_of_transformers_is_sound_or_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    sound = 0
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            require_sound(shape_of(kind, tmp_path / kind))
            sound += 1
        except (UsageError, pytest.skip.Exception):
            continue
    assert sound > 120


def test_latent_attention_and_dense_layers_need_no_torch(tmp_path: Path) -> None:
    """DeepSeek-V2-Lite has 15.7 billion parameters, of which 2.4 billion are active."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V2_LITE))
    with mock.patch("harness.planner.cluster.hf_config.is_installed", return_value=False):
        shape = parse_shape(f"hf:{tmp_path}")
    require_sound(shape)
    assert shape.parameters == 15_706_484_224
    active = shape.layers * shape.active_parameters + shape.end_parameters
    assert active == pytest.approx(2.66e9, rel=0.01)
    assert (shape.dense_layers, shape.dense_feed_forward) == (1, 10944)
    assert not shape.undescribed


def test_the_text_part_of_a_new_vision_model_is_built(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.AutoConfig.for_model("qwen3_5").save_pretrained(tmp_path)
    shape = parse_shape(f"hf:{tmp_path}")
    require_sound(shape)
    assert shape.name == f"qwen3_5 (text model, and a tower of {shape.tower / 1e9:.2f}B)"
    assert shape.attention


def test_a_negative_rest_is_refused() -> None:
    with pytest.raises(UsageError, match="other is -1; give at least 0"):
        ModelShape("m", layers=2, hidden=64, heads=4, feed_forward=64, vocabulary=64, other=-1)
