"""LoRA of mixtures of experts: the planner's counts, and what peft does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from harness.planner.cluster.footprint import layer_bytes, merged_bytes
from harness.planner.cluster.recipe import Adapter, Recipe
from tests.unit.test_layer_bytes import BATCH, SEQUENCE, model_of, shape_of

pytestmark = pytest.mark.filterwarnings("ignore")
LORA = Recipe(adapter=Adapter(2), sequence=SEQUENCE, micro_batch=BATCH)


def adapted(kind: str, layers: int) -> Any:
    """Returns a bf16 model with fp32 adapters, and its embedding."""
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    model = model_of(kind, layers).to(torch.bfloat16)
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda _, __, output: output.requires_grad_())
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))


def saved_bytes(kind: str, layers: int) -> int:
    torch = pytest.importorskip("torch")
    model = adapted(kind, layers)
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            found[storage.data_ptr()] = storage
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        model.base_model.model.model(
            input_ids=torch.randint(3, 128, (BATCH, SEQUENCE)), use_cache=False
        )
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "qwen2_moe"])
def test_adapters_have_as_many_parameters_as_pefts(kind: str, tmp_path: Path) -> None:
    shape = dataclasses.replace(shape_of(kind, tmp_path), layers=2)
    learned = [
        parameter.numel()
        for name, parameter in adapted(kind, 2).named_parameters()
        if parameter.requires_grad and "shared_expert_gate" not in name
    ]
    assert Adapter(2).parameters(shape) == sum(learned)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_a_layer_keeps_its_experts_with_their_adapters_added(kind: str, tmp_path: Path) -> None:
    shape = shape_of(kind, tmp_path)
    saved = saved_bytes(kind, 3) - saved_bytes(kind, 2)
    counted = layer_bytes(shape, LORA) * LORA.tokens + merged_bytes(shape, LORA)
    assert counted == pytest.approx(saved, rel=0.03)
