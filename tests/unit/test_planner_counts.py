"""Planned models and the workloads that plans write have the same number of parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.cell.errors import UsageError
from harness.planner.cluster.hf_config import named_shapes, parse_shape
from harness.planner.follow_up import workload_of
from harness.workloads import make_workload
from tests.unit.test_hf_config import LLAMA, SMALL

WRITTEN = [
    "llama",
    "mistral",
    "granite",
    "phi3",
    "olmo2",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "falcon",
    "gpt_neox",
    "starcoder2",
    "mixtral",
    "olmoe",
]
"""Model types whose cells a plan writes as `hf:PATH`."""
TIED = {"tie_word_embeddings": True}


def built_parameters(workload: str) -> int:
    return sum(p.numel() for p in make_workload(workload).on_meta().parameters())


@pytest.mark.parametrize("name", sorted(named_shapes()))
def test_a_named_model_is_its_workload_or_has_none(name: str) -> None:
    try:
        workload = workload_of(name)
    except UsageError:
        return
    assert parse_shape(name).parameters == built_parameters(workload)


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_config_is_its_workload(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = LLAMA if kind not in ("gpt2", "falcon", "gpt_neox") else SMALL
    extra = {"pad_token_id": 0} if kind == "phi3" else {}
    tied = TIED if kind in ("qwen2", "llama") else {}
    transformers.AutoConfig.for_model(kind, **sizes, **extra, **tied).save_pretrained(tmp_path)
    name = f"hf:{tmp_path}"
    assert workload_of(name) == name
    assert parse_shape(name).parameters == built_parameters(name)
