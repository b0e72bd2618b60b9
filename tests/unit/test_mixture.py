"""Mixtures of experts: tokens of each expert, and pitfalls of the libraries."""

from __future__ import annotations

import dataclasses
import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness.cell.cell import Cell
from harness.cell.errors import Refused, Unavailable
from harness.measure.rank_traffic import ExpertTokens, counted, routers_of
from harness.parity.verdict import allowed_deviation
from harness.seam.formulas import unit_sizes
from harness.seam.registry import make_strategy, validate
from harness.strategies import _distributed as mesh
from harness.workloads import make_workload
from harness.workloads.counts import ModelFacts, model_facts
from harness.workloads.recompute import recompute_blocks
from tests.unit.html_page import page_of
from tests.unit.made_results import stored, trial_rows
from tests.unit.recording import answer, figures


def cell(strategy: str, workload: str = "mixtral-nano", devices: int = 2, **axes: Any) -> Cell:
    return Cell(strategy=strategy, workload=workload, devices=devices, sequence_length=32, **axes)


DIVIDES_RANKS = tuple(map(int, version("transformers").split(".")[:2])) >= (5, 23)
needs_meshes = pytest.mark.skipif(
    not DIVIDES_RANKS, reason="transformers divides ranks into meshes only since 5.23"
)


def test_tokens_of_each_expert_are_counted_once() -> None:
    """Tokens count once even in a wrapper, or if blocks are recomputed during backward."""
    workload = make_workload("mixtral-nano")
    plain, again = workload.build(0), workload.build(0)
    recompute_blocks(again, workload.blocks_of(again), "full")
    inputs = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(0))

    def tokens(model: nn.Module, wrapper: nn.Module) -> ExpertTokens:
        counts: ExpertTokens = {}
        with counted(routers_of(wrapper, workload), counts):
            workload.logits(model, inputs).sum().backward()
        workload.logits(model, inputs)
        return counts

    counts = tokens(plain, nn.ModuleDict({"module": plain}))
    assert counts == tokens(again, again)
    assert sorted(counts) == [0, 1]
    assert {sum(tokens) for tokens in counts.values()} == {4 * 16 * 2}
    assert {len(tokens) for tokens in counts.values()} == {4}


def test_counts_of_ranks_are_added_up() -> None:
    # The last is a tensor-parallel peer of another rank.
    tokens: list[ExpertTokens] = [*2 * [{0: (3, 1), 1: (2, 2)}], {}]
    ranks = [answer(0, [1.0], expert_tokens=each) for each in tokens]
    trial = figures(cell("ddp"), ranks, ModelFacts(("w",), 5, 1000, (5,)), None)
    assert json.loads(trial.expert_tokens or "") == [[6, 2], [4, 4]]
    assert trial.expert_imbalance == 1.5


def test_half_precision_may_choose_other_experts() -> None:
    """Half precision may deviate more here than elsewhere. In fp32 the order of additions may
    change the expert of only a few tokens, whose scores are otherwise equal."""
    limits = []
    for workload, precision in (
        ("mixtral-nano", "bf16"),
        ("llama-nano", "bf16"),
        ("mixtral-nano", "fp32"),
    ):
        one = cell("ddp", workload, precision=precision)
        strategy, made = make_strategy(one), make_workload(workload)
        limits.append(allowed_deviation(one, made, strategy, strategy.layout(2)))
    assert [limit.update for limit in limits] == [0.35, 0.02, 0.02]
    assert "other experts" in limits[0].reason


def test_the_report_begins_with_the_least_balanced_experts(tmp_path: Path) -> None:
    rows = trial_rows(cell("even"), [9.0], expert_tokens="[[8, 8]]", expert_imbalance=1.0)
    rows += trial_rows(cell("odd"), [5.0], expert_tokens="[[15, 1]]", expert_imbalance=1.875)
    text = page_of(stored(tmp_path, rows), tmp_path).text
    drawn = text[text.index("Imbalance of experts") :]
    assert drawn.index("odd x2") < drawn.index("even x2")


EXPERTS: dict[str, Any] = {"options": {"split": "experts"}}


@needs_meshes
@pytest.mark.parametrize(
    ("strategy", "workload", "devices", "axes", "reason"),
    [
        ("distributed_config", "llama-nano", 2, {"options": {"expert": 2}}, "has no experts"),
        ("distributed_config", "mixtral-nano", 3, {"options": {"expert": 3}}, "do not divide"),
        ("distributed_config", "mixtral-nano", 4, {"options": {"tensor": 4, "expert": 2}}, "4"),
        ("distributed_config", "mixtral-nano", 3, {"options": {"tensor": 2}}, "3 devices are not"),
        ("distributed_config", "mixtral-nano", 1, {}, "at least 2 devices"),
        ("distributed_config", "resnet-micro", 2, {}, "without a suffix"),
        ("distributed_config", "gpt2-nano", 2, {"options": {"tensor": 2}}, "no tensor-parallel"),
        ("deepspeed_auto", "llama-nano", 2, EXPERTS, "has no experts that DeepSpeed could divide"),
        ("deepspeed_auto", "mixtral-nano", 3, EXPERTS, "3 devices are not divisible by ranks 2"),
        ("parallelism_config", "llama-nano", 2, {"options": {"replicas": 2}}, "1 device each"),
    ],
)
def test_cells_that_cannot_run_say_why(
    strategy: str, workload: str, devices: int, axes: dict[str, Any], reason: str
) -> None:
    one = cell(strategy, workload, devices, global_batch=12, **axes)
    with pytest.raises(Refused, match=reason):
        validate(one, make_workload(workload))


@needs_meshes
def test_gradients_of_norms_within_heads_would_be_added_up_twice() -> None:
    """transformers all-reduces accumulated gradients in every micro-batch."""
    axes: dict[str, Any] = {"options": {"tensor": 2}, "micro_batches": 2}
    for strategy in ("distributed_config", "parallelism_config"):
        with pytest.raises(Refused, match="micro-batch"):
            validate(cell(strategy, "qwen3-moe-nano", **axes), make_workload("qwen3-moe-nano"))
        validate(cell(strategy, **axes), make_workload("mixtral-nano"))


@needs_meshes
def test_accelerate_combines_no_tensor_parallelism_with_sharding() -> None:
    """Once transformers has ReplicateParallel, the reason is out of date."""
    one = cell("parallelism_config", devices=4, options={"tensor": 2})
    with pytest.raises(Unavailable, match="ReplicateParallel"):
        validate(one, make_workload(one.workload))
    with pytest.raises(ImportError):
        from transformers.integrations.tensor_parallel import (
            ReplicateParallel,  # type: ignore[attr-defined] # noqa: F401
        )


@needs_meshes
@pytest.mark.parametrize(
    "sizes",
    [
        mesh.MeshSizes(1, 2, 1, 2),
        mesh.MeshSizes(1, 1, 2, 2),
        mesh.MeshSizes(1, 1, 2),
        mesh.MeshSizes(2, 2, 1),
    ],
)
def test_transformers_takes_the_plans_that_it_is_given(sizes: mesh.MeshSizes) -> None:
    """transformers refuses an empty plan, though its docstring says one applies no rule."""
    with torch.device("meta"):
        model: Any = make_workload("mixtral-nano").build(0, saved_weights=False)
    config = mesh.distributed_config(sizes)
    model._resolve_parallel_plans(config)
    if sizes.tensor > 1:
        with pytest.raises(ValueError, match="has no `tp_plan`"):
            model._resolve_parallel_plans(dataclasses.replace(config, tp_plan={}))


def test_a_mesh_of_the_hosts_accelerator_is_no_mesh_of_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cuda"))
    job: Any = SimpleNamespace(device=torch.device("cpu"), model=lambda recompute: None)
    with pytest.raises(RuntimeError, match=r"cuda devices for a cell on cpu.*CUDA_VISIBLE_DEVICES"):
        mesh.load(job, mesh.MeshSizes(1, 2, 1))


@needs_meshes
@pytest.mark.parametrize(
    ("strategy", "options", "more"),
    [
        ("parallelism_config", {}, 3 / 4),
        ("parallelism_config", {"replicas": 2}, 1 / 2),
        ("distributed_config", {}, 3 / 4),
        ("distributed_config", {"replicas": 2}, 0),
    ],
)
def test_whole_gradients_stay_until_the_last_micro_batch(
    strategy: str, options: dict[str, int], more: float
) -> None:
    """Only the second block's ever were shards. With replicas, transformers scatters the gradients
    of every micro-batch."""
    found = []
    facts = model_facts(make_workload("llama-nano"), 32)
    block = unit_sizes(make_workload("llama-nano"), facts)["model.layers.1"]
    for parts in (1, 2):
        one = cell(strategy, "llama-nano", 4, options=options, micro_batches=parts)
        states = make_strategy(one).states(one, make_strategy(one).layout(4), facts)
        assert states is not None
        found.append(states.transient)
    assert found[1] - found[0] == pytest.approx(more * 4 * block)


@pytest.mark.parametrize("name", ["mixtral-nano", "qwen3-moe-nano"])
def test_the_auxiliary_loss_of_routers_is_not_trained(name: str) -> None:
    """The auxiliary loss multiplies two means over tokens, so ranks' mean is not the batch's."""
    workload = make_workload(name)
    model: Any = workload.build(0)
    inputs = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))

    def balance(samples: torch.Tensor) -> float:
        loss: float = model(samples, output_router_logits=True).aux_loss.item()
        return loss

    ranks = (balance(inputs[:2]) + balance(inputs[2:])) / 2
    assert abs(ranks / balance(inputs) - 1) > 1e-4, "far above rounding"
    plain = model(inputs, labels=inputs)
    assert plain.aux_loss is None
    again = model(inputs, labels=inputs, output_router_logits=True)
    assert again.loss.item() == plain.loss.item(), "not even if a library asks for it"


@pytest.mark.parametrize(
    ("strategy", "options"), [("distributed_config", {}), ("parallelism_config", {"tensor": 2})]
)
def test_a_model_is_loaded_in_parts_by_a_newer_transformers_only(
    monkeypatch: pytest.MonkeyPatch, strategy: str, options: dict[str, int]
) -> None:
    """DistributedConfig has replicas, shards and experts since 5.23."""
    monkeypatch.setattr(mesh, "version", lambda package: "5.22.3")
    one = cell(strategy, "llama-nano", options=options)
    with pytest.raises(Unavailable, match=r"5\.22\.3.*5\.23"):
        validate(one, make_workload(one.workload))
