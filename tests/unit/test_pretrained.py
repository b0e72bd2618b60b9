"""Workloads from a user's config.json: structure read from the model, and refusals."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from bench.expand import expand
from bench.matrix import Host, read_matrix
from harness.cell.cell import Cell
from harness.cell.errors import Refused, UsageError
from harness.export import plan_of
from harness.seam.registry import make_strategy, validate
from harness.strategies._accelerate_config import block_classes
from harness.strategies.fsdp1 import wrap_policy
from harness.workloads import make_workload, prepare_data
from harness.workloads.counts import ModelFacts, model_facts
from harness.workloads.structure import read_structure
from harness.workloads.workload import made_up_spectra
from tests.tiny_models import MODELS, save_config
from tests.unit.test_mixture import needs_meshes

ALONE = {"mamba": 0, "falcon": 4, "vit": 4}
"""Attention heads of models that tensor parallelism cannot split."""


def refusal(strategy: str, workload: str, devices: int = 2, **axes: Any) -> str:
    axes = {"sequence_length": 32, "global_batch": 8, **axes}
    cell = Cell(strategy=strategy, devices=devices, workload=workload, **axes)
    with pytest.raises(Refused) as refused:
        validate(cell, make_workload(workload))
    return str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_structure_and_counts_are_those_of_the_built_model(tmp_path: Path, model: str) -> None:
    workload = make_workload(save_config(tmp_path, model))
    built = workload.build(0, saved_weights=False)
    facts = model_facts(workload, 32)
    assert facts.parameters == sum(p.numel() for p in built.parameters())
    assert facts.flops_per_sample > 0
    blocks = workload.blocks_of(built)
    assert len(blocks) == workload.blocks == (4 if model == "t5" else 2)
    assert block_classes(workload) == sorted({type(block).__name__ for block in blocks})
    in_blocks = sum(p.numel() for block in blocks for p in block.parameters())
    assert in_blocks > 0.3 * facts.parameters
    if model in ALONE:
        assert (workload.split, workload.query_heads) == (None, ALONE[model])


def test_blocks_of_both_halves_are_gathered_twice(tmp_path: Path) -> None:
    workload = make_workload(save_config(tmp_path, "t5"))
    cell = Cell(strategy="fsdp2", devices=2, workload=workload.name, sequence_length=32)
    strategy, facts = make_strategy(cell), model_facts(workload, 32)
    sent = strategy.traffic(cell, strategy.layout(2), facts)
    assert sent is not None
    assert sent > 1.1 * facts.parameter_bytes  # a gather and a scatter are one


@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma3_text"])
def test_ties_are_read(tmp_path: Path, model: str) -> None:
    tied = make_workload(save_config(tmp_path / "tied", model))
    assert tied.split is not None
    assert tied.split.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    apart = make_workload(save_config(tmp_path / "apart", model, tie_word_embeddings=False))
    assert apart.split is not None
    assert apart.split.tied == {}
    assert "share" in refusal("tiled_linear", tied.name, micro_batches=1)


@needs_meshes
def test_a_tied_head_sends_as_much_as_one_with_its_own_weight(tmp_path: Path) -> None:
    sent = []
    for tied in (True, False):
        name = save_config(tmp_path / str(tied), "llama", tie_word_embeddings=tied)
        model = make_workload(name).on_meta()
        names = tuple(path for path, _ in model.named_parameters())
        facts = ModelFacts(names, len(names), 0, (1,) * len(names))
        axes: dict[str, Any] = {"sequence_length": 32, "options": {"tensor": 2}}
        cell = Cell(strategy="parallelism_config", devices=2, workload=name, **axes)
        strategy = make_strategy(cell)
        sent.append(strategy.traffic(cell, strategy.layout(2), facts))
    assert sent[0]
    assert sent[0] == sent[1]


@pytest.mark.parametrize(("strategy", "devices"), [("pipeline", 2), ("three_d", 8)])
def test_stages_by_the_models_own_forward_are_not_exported(
    tmp_path: Path, strategy: str, devices: int
) -> None:
    """An exported script's stages feed hidden states in as embeddings, which Gemma would scale."""
    cell = Cell(strategy=strategy, devices=devices, workload=save_config(tmp_path, "gemma3_text"))
    assert plan_of(make_strategy(cell), cell, "torchrun") is None


@pytest.mark.parametrize("model", ["gemma3_text", "mistral", "mixtral"])
def test_limited_attention_is_refused_under_sequence_parallelism(
    tmp_path: Path, model: str
) -> None:
    name = save_config(tmp_path, model)
    assert "8 tokens" in refusal("ulysses", name)
    cell = Cell(strategy="ulysses", devices=2, workload=name, sequence_length=8)
    validate(cell, make_workload(name))


TENSOR = ("tensor", {})
SEQUENCE = ("tensor", {"sequence_parallel": True})
WIDE = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}


@pytest.mark.parametrize(
    ("strategy", "model", "changes", "reason"),
    [
        (("ulysses", {}), "falcon", {}, "cannot be replaced"),
        (("ulysses", {}), "mamba", {}, "cannot be replaced"),
        (SEQUENCE, "llama", {}, "share a weight"),
        (SEQUENCE, "llama", {"vocab_size": 257, "tie_word_embeddings": False}, " 257 "),
        (TENSOR, "qwen2", {"intermediate_size": 345}, " 345 "),
        (TENSOR, "llama", {"intermediate_size": 345}, " 345 "),
        (TENSOR, "phi", WIDE, " 3 "),
    ],
)
def test_what_cannot_be_split_is_refused(
    tmp_path: Path,
    strategy: tuple[str, dict[str, Any]],
    model: str,
    changes: dict[str, Any],
    reason: str,
) -> None:
    name, options = strategy
    workload = save_config(tmp_path, model, **changes)
    assert reason in refusal(name, workload, options=options)


@pytest.mark.parametrize("changes", [{"num_labels": 1}, {"problem_type": "regression"}])
def test_losses_other_than_of_one_class_are_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    name = save_config(tmp_path, "qwen2", "Qwen2ForSequenceClassification", **changes)
    assert refusal("ddp", name)


def test_learned_positions_after_a_padding_row_are_fewer(tmp_path: Path) -> None:
    workload = make_workload(save_config(tmp_path, "roberta"))
    assert workload.max_tokens == 512
    with pytest.raises(UsageError, match="512"):
        prepare_data("stdlib", workload, 513)


@pytest.mark.parametrize("model", ["qwen2", "roberta", "gemma3_text"])
def test_a_config_without_a_tokenizer_gets_bytes(tmp_path: Path, model: str) -> None:
    workload = make_workload(save_config(tmp_path, model))
    assert prepare_data("stdlib", workload, 64).tokens.dtype.name == "uint8"


def test_training_arguments_are_no_weights(tmp_path: Path) -> None:
    name = save_config(tmp_path, "qwen2")
    (tmp_path / "training_args.bin").write_bytes(b"")
    make_workload(name).build(0)


def test_an_index_without_its_files_is_a_mistake(tmp_path: Path) -> None:
    name = save_config(tmp_path, "qwen2")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UsageError, match="index"):
        make_workload(name)


@pytest.mark.parametrize("model", ["deberta-v2", "vit", "roberta"])
def test_zero_gradients_are_read(tmp_path: Path, model: str) -> None:
    """Exactly the named gradients vanish in double precision with nonzero biases."""
    workload = make_workload(save_config(tmp_path, model))
    built: Any = workload.build(0).double().eval()
    torch.manual_seed(0)
    for parameter in built.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    data = prepare_data("images" if model == "vit" else "stdlib", workload, 32)
    inputs, labels = (torch.as_tensor(array) for array in data.batch(0, 0, 4, slice(0, 4)))
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    logits = workload.logits(built, inputs)
    functional.cross_entropy(logits.flatten(0, -2), labels.flatten()).backward()
    vanish = {n for n, p in built.named_parameters() if p.grad is None or p.grad.norm() < 1e-12}
    assert vanish == read_structure(built).zero_gradients != set()


def test_one_unsuitable_workload_leaves_the_other_cells(tmp_path: Path) -> None:
    """A workload with too few positions is refused among others, and an error on its own."""
    short = save_config(tmp_path / "short", "roberta", max_position_embeddings=12)
    good = save_config(tmp_path / "good", "qwen2")
    host = Host("cpu", 2, 2**34)
    matrix, only = read_matrix("smoke"), ["ddp"]
    both = expand(matrix, host, only=only, changes={"workload": [short, good]})
    assert {cell.workload for cell in both.cells} == {good}
    assert {left.cell.workload for left in both.left_out if left.status == "refused"} == {short}
    with pytest.raises(UsageError, match="10 positions"):
        expand(matrix, host, only=only, changes={"workload": [short]})


def test_every_kind_of_labels_is_drawn(tmp_path: Path) -> None:
    """15% of tokens are masked; a decoder reads shifted labels; a token's class follows its id."""
    masked = prepare_data("stdlib", make_workload(save_config(tmp_path / "m", "roberta")), 32)
    inputs, labels = masked.batch(0, 0, 4, slice(0, 4))
    assert ((labels != -100).sum(1) == 5).all()
    assert (inputs[labels != -100] == 255).all()
    pairs = prepare_data("stdlib", make_workload(save_config(tmp_path / "s", "t5")), 32)
    inputs, labels = pairs.batch(0, 0, 4, slice(0, 4))
    assert labels.shape == (4, 16)
    assert (inputs[:, 17:] == labels[:, :-1]).all()
    tokens = prepare_data("stdlib", make_workload(save_config(tmp_path / "t", "deberta-v2")), 32)
    inputs, labels = tokens.batch(0, 0, 4, slice(0, 4))
    assert (labels == inputs % 5).all()


@pytest.mark.parametrize("tied", [True, False])
def test_fsdp1_never_cuts_shared_parameters_apart(tied: bool) -> None:
    """Without blocks, FSDP1 wraps by size, except modules that share a parameter."""
    model = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64, bias=False))
    if tied:
        model[1].weight = model[0].weight
    job: Any = SimpleNamespace(workload=SimpleNamespace(blocks_of=lambda model: []))
    policy = wrap_policy(job, model)
    cut = policy(module=model[1], recurse=False, nonwrapped_numel=512)
    assert cut is not tied


def test_parameters_without_part_in_the_loss_are_frozen_or_refused(tmp_path: Path) -> None:
    workload = make_workload(save_config(tmp_path / "dinov2", "dinov2"))
    assert (workload.unused, workload.partly_frozen) == (("dinov2.embeddings.mask_token",), True)
    assert not any("mask_token" in name for name in model_facts(workload, 32).trainable)
    with pytest.raises(UsageError, match="query_global"):
        model_facts(make_workload(save_config(tmp_path / "longformer", "longformer")), 32)


def test_blocks_are_modules_and_not_lists_of_modules(tmp_path: Path) -> None:
    workload = make_workload(save_config(tmp_path, "funnel"))
    assert workload.block_paths == ("funnel.encoder.blocks.0",)
    name = "funnel.encoder.blocks.0.0.attention.k_head.bias"
    assert not len(workload.without_zero_gradient(name, torch.ones(2)))


def test_a_speech_model_hears_its_text(tmp_path: Path) -> None:
    workload = make_workload(save_config(tmp_path, "whisper"))
    assert (workload.kind, workload.spectrum, workload.max_tokens) == ("speech", (8, 32), 128)
    low, high, both = (
        made_up_spectra(torch.tensor([ids]), 8, 32) for ids in ([1, 1], [2, 2], [1, 2])
    )
    assert both.shape == (1, 8, 32)
    assert torch.equal(both, torch.cat([low[..., :16], high[..., 16:]], dim=2))
    assert not torch.isclose(low, high).any()


@pytest.mark.parametrize("method", ["gptq", "fp8", "mxfp4"])
def test_quantised_weights_are_not_trained_as_if_they_were_plain(
    tmp_path: Path, method: str
) -> None:
    workload = save_config(tmp_path, "llama", quantization_config={"quant_method": method})
    assert "quantised weights" in refusal("ddp", workload)
