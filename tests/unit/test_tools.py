"""What people say about a training: options, defaults of tools, and tools' own files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.cli import app
from harness.cell.errors import UsageError
from harness.host.gpu_models import parse_gpus
from harness.planner.cluster.footprint import footprint
from harness.planner.cluster.hf_config import parse_shape
from harness.planner.cluster.recipe import Adapter, Recipe
from harness.planner.tools import DERIVED, FIELDS, config_fields, parsed, tool_fields, tool_names

AXOLOTL = """
base_model: llama-8b
load_in_4bit: true
adapter: qlora
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 4
lora_r: 32
lora_target_linear: true
optimizer: paged_adamw_32bit
gradient_checkpointing: true
fsdp_config:
  offload_params: true
"""
TORCHTUNE = """
batch_size: 2
gradient_accumulation_steps: 8
model: {lora_rank: 8, lora_attn_modules: [q_proj, v_proj, output_proj]}
tokenizer: {max_seq_len: 2048}
optimizer: {_component_: torch.optim.AdamW}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
enable_activation_checkpointing: True
dtype: bf16
"""
DEEPSPEED = """{"zero_optimization": {"stage": 2, "offload_param": {"device": "none"}},
"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}"""
ARGUMENTS = """--model_name_or_path llama-8b --per_device_train_batch_size 8 --use_peft
--max_length=1024 --optim adamw_8bit --gradient_checkpointing"""


def asked(words: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["fits", *words.split(), "--json"])
    assert result.stdout, result.exception
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_every_field_of_the_recipe_can_be_set() -> None:
    """An option or `--set` reaches each field, and its value is in the answer."""
    names = {field.name for field in dataclasses.fields(Recipe)}
    assert names == ({*FIELDS} | {*DERIVED}) - {"model", "method", "rank", "targets"}
    given = {
        "precision": "pure-bf16",
        "sharding": "grad",
        "recompute": "selective",
        "sequence": 1024,
        "micro_batch": 2,
        "accumulation": 3,
        "synchronised": True,
        "tensor": 2,
        "expert": 2,
        "library": "native",
        "loss": "chunked",
        "optimizer": "muon",
        "compiled": True,
        "quantised_experts": True,
        "fp32_embeddings": True,
        "offloaded_activations": True,
        "fused_optimizer": False,
        "fp32_stream": True,
        "trained_tower": True,
        "gathered_save": True,
        "offload": True,
    }
    assert {*given} == names - {"adapter", "gpus", "base"}
    settings = " ".join(f"--set {name}={value}" for name, value in given.items())
    recipe = asked(f"llama-8b --gpus 2xh100-80gb --method full {settings}")["recipe"]
    assert {name: recipe[name] for name in given} == given
    words = "--targets q,v --lora-rank 4 --set base=int8"
    recipe = asked(f"llama-8b --gpus h100-80gb {words}")["recipe"]
    assert recipe["adapter"]["rank"] == 4
    assert recipe["base"] == "int8"
    assert "o" not in recipe["adapter"]["targets"]


def test_accumulation_changes_the_answer() -> None:
    """FSDP2 keeps whole gradients over micro-batches, unless it reduces each of them."""
    words = "llama-8b --gpus 8xa100-40gb --method full"
    one, several = asked(words), asked(f"{words} --accumulation 8")
    assert (one["verdict"], several["verdict"]) == ("yes", "no")
    assert several["peak_bytes"] > 1.5 * one["peak_bytes"]
    assert asked(f"{words} --accumulation 8 --set synchronised=yes")["verdict"] == "yes"
    assert {"name": "set", "value": "synchronised=yes"}.items() <= several["remedies"][0].items()


def test_a_chunked_loss_has_no_logits() -> None:
    """Liger's loss makes four times longer sequences fit."""
    words = "llama-8b --gpus a100-80gb --method lora --recompute full --micro-batch 8 --seq 4096"
    plain, chunked = (asked(f"{words} --loss {loss}") for loss in ("plain", "chunked"))
    logits = 8 * 4096 * 128256
    assert plain["allocated_bytes"] - chunked["allocated_bytes"] > 11 * logits
    assert chunked["longest_sequence"] > 1.9 * plain["longest_sequence"]


@pytest.mark.parametrize("tool", tool_names())
@pytest.mark.parametrize("method", ["full", "lora"])
def test_defaults_of_tools_are_understood(tool: str, method: str) -> None:
    for name, text in tool_fields(tool.upper(), method).items():
        parsed(name, text)


def test_what_is_said_goes_before_a_file_and_a_file_before_a_tool(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(AXOLOTL)
    answer = asked(f"--gpus 2x3090 --config {file} --like axolotl --lora-rank 8")
    recipe = answer["recipe"]
    assert (answer["model"], recipe["adapter"]["rank"]) == ("llama-8b", 8)
    assert (recipe["accumulation"], recipe["optimizer"]) == (4, "paged-adamw")
    assert (recipe["base"], recipe["loss"]) == ("nf4-double", "chunked")


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (AXOLOTL, {"method": "qlora", "base": "nf4-double", "offload": True, "sequence": 4096}),
        (TORCHTUNE, {"method": "lora", "loss": "chunked", "sequence": 2048, "recompute": "full"}),
        (DEEPSPEED, {"method": "full", "sharding": "grad", "micro_batch": 4, "offload": None}),
        (ARGUMENTS, {"method": "lora", "micro_batch": 8, "recompute": "full", "sequence": 1024}),
    ],
)
def test_files_of_tools_are_read(tmp_path: Path, text: str, fields: dict[str, object]) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    found = {name: parsed(name, value) for name, value in config_fields(file).items()}
    assert {name: found.get(name) for name in fields} == fields


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("method", "LoRA", "lora"),
        ("sequence", "32k", 32768),
        ("sequence", "4,096", 4096),
        ("targets", "q_proj,v_proj", ("q", "v", "qkv")),
        ("recompute", "on", "full"),
        ("sharding", "zero-2", "grad"),
        ("optimizer", "adamw_bnb_8bit", "adamw-8bit"),
        ("loss", "Liger", "chunked"),
        ("base", "GPTQ", "gptq4"),
    ],
)
def test_values_as_people_type_them(field: str, text: str, value: object) -> None:
    assert parsed(field, text) == value


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-8b"),
        ("llama-3.1-8b", "llama-8b"),
        ("Qwen/Qwen3-32B", "qwen3-32b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("google/gemma-3-12b-it", "gemma-3-12b"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini"),
    ],
)
def test_models_as_people_name_them(text: str, name: str) -> None:
    assert parse_shape(text).name == name


def test_the_nearest_models_are_named() -> None:
    with pytest.raises(UsageError, match="the nearest are llama-8b, llama-7b, llama-3b"):
        parse_shape("llama-9b")


def test_quantised_weights_of_a_config_are_not_ignored(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 160,
        "num_attention_heads": 4,
        "quantization_config": {"quant_method": "gptq"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "gptq weights counted as bf16" in parse_shape(f"hf:{tmp_path}").name


@pytest.mark.parametrize("text", ["4090x2", "2x4090", "2 x rtx-4090", "4090 X 2"])
def test_numbers_of_gpus_as_people_type_them(text: str) -> None:
    count, gpu = parse_gpus(text)
    assert (count, gpu.host_name) == (2, "rtx-4090")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--like torchtun", "did you mean torchtune"),
        ("--set los=plain", "did you mean loss"),
        ("--set offload=perhaps", "give yes or no"),
        ("--optimizer adam9", "give one of adamw"),
        ("--targets q,z", "'z' is neither all nor one of"),
        ("--seq 0", "give a whole number"),
        (
            "--method full --precision pure-bf16-fused --accumulation 2",
            "cannot accumulate gradients",
        ),
        ("--config nowhere.yaml", "cannot read config"),
    ],
)
def test_mistakes_name_what_would_be_right(words: str, hint: str) -> None:
    result = CliRunner().invoke(app, ["fits", "llama-8b", "--gpus", "4090", *words.split()])
    assert isinstance(result.exception, UsageError)
    assert hint in str(result.exception)


def test_a_tool_keeps_its_code() -> None:
    """LLaMA-Factory made logits of 51,974 tokens, which did not fit an H100."""
    answer = asked("llama-8b --gpus h100 --method qlora --like llama-factory --seq 51974")
    assert (answer["verdict"], answer["recipe"]["loss"]) == ("no", None)
    alone = asked("llama-8b --gpus h100 --method qlora --accumulation 8 --seq 51974")
    assert (alone["verdict"], alone["recipe"]["loss"]) == ("yes", "chunked")


def test_offload_shards_also_on_one_gpu() -> None:
    """States leave the GPU, but what is gathered for a layer does not."""
    answer = asked("llama-8b --gpus 4090 --method full --precision pure-bf16 --offload yes")
    assert answer["recipe"]["sharding"] == "full"
    ends = 2 * 2 * 128256 * 4096
    assert answer["allocated_bytes"] > ends
    assert answer["verdict"] == "yes"


QWEN_2_5_VL_7B = {
    "model_type": "qwen2_5_vl",
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "hidden_act": "silu",
    },
}


def test_a_tower_of_a_vision_model_counts_frozen_or_trained(tmp_path: Path) -> None:
    """The tower of Qwen2.5-VL has 669 million parameters, 6% of which are not in its layers."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_2_5_VL_7B))
    shape = parse_shape(f"hf:{tmp_path}")
    assert shape.tower == pytest.approx(0.669e9, rel=0.07)
    assert shape.parameters == pytest.approx(7.62e9, rel=0.01)
    without = dataclasses.replace(shape, tower=0)
    for recipe, per_parameter in (
        (Recipe(adapter=Adapter()), 2),
        (Recipe(), 2),
        (Recipe(trained_tower=True), 8),
        (Recipe("bf16", trained_tower=True, gpus=8, sharding="full"), 2),
    ):
        more = footprint(shape, recipe).update - footprint(without, recipe).update
        assert more == pytest.approx(per_parameter * shape.tower)


def test_a_save_that_gathers_the_model_may_be_the_peak() -> None:
    """A 7B model trained on four A100-40 could not be saved (haotian-liu/LLaVA, issue 177)."""
    shape = parse_shape("llama-7b")
    usual = Recipe("bf16", gpus=4, sharding="full", recompute="full", micro_batch=1)
    gathered = dataclasses.replace(usual, gathered_save=True)
    assert footprint(shape, usual).saving < footprint(shape, usual).update
    assert footprint(shape, gathered).peak > 43e9
    assert footprint(shape, usual).peak < 40e9


def test_adapters_train_on_several_nodes() -> None:
    """Slower networks between nodes take longer, and a part of a node is refused."""
    words = "llama-70b --method lora --seq 4096 --gpus"
    speeds = [
        asked(f"{words} {gpus}")["tokens_per_second"]
        for gpus in ("8xh100", "16xh100 --link nvlink,400gbit", "16xh100 --link nvlink,25gbit")
    ]
    assert speeds[1] > 1.5 * speeds[0]
    assert speeds[2] < speeds[1]
    result = CliRunner().invoke(app, ["fits", *words.split(), "12xh100"])
    assert "must fill nodes of 8" in str(result.exception)


def test_a_quantised_base_of_litgpt_keeps_more() -> None:
    """QLoRA of Llama 2 7B took 13.7 GB on an A10G (litgpt's table of configs)."""
    words = "llama-2-7b --gpus a10g --method qlora --seq 512 --micro-batch 2 --set base=nf4"
    answer = asked(f"{words} --like litgpt --lora-rank 32")
    assert answer["allocated_bytes"] == pytest.approx(13.68e9, rel=0.07)


def test_old_code_of_a_quantised_llama_under_fsdp_is_not_called_certain() -> None:
    """Llama 2 70B ran out of memory on two A100-80 (fms-acceleration's benchmarks)."""
    words = "llama-2-70b --gpus 2xa100-80gb --method qlora --like fms --seq 4096 --targets q,k,v,o"
    answer = asked(f"{words} --sharding full --set library=transformers-2024")
    assert 0.5 < answer["fits"] <= 0.9


@pytest.mark.parametrize(("loss", "per_logit"), [("plain", 12), ("fused", 8)])
def test_bytes_of_logits_hold_for_two_vocabularies(loss: str, per_logit: int) -> None:
    """Llama 3 8B and PowerLM keep as many on one GPU and on two (their published peaks)."""
    for model in ("llama-8b", "llama-7b"):
        shape = parse_shape(model)
        for gpus in (1, 2):
            short, long = (
                footprint(
                    shape,
                    Recipe(
                        adapter=Adapter(),
                        recompute="full",
                        sequence=sequence,
                        loss=loss,  # type: ignore[arg-type]
                        gpus=gpus,
                        sharding="full" if gpus > 1 else "none",
                    ),
                ).loss
                for sequence in (4096, 8192)
            )
            logits = 4096 * shape.vocabulary
            others = 4096 * (2 * shape.layers + 6) * shape.hidden
            assert (long - short - others) / logits == pytest.approx(per_logit, abs=0.01)


def test_torchtune_reduces_gradients_of_each_micro_batch() -> None:
    """Llama 2 70B took 51 GB on each of eight A100-80 (torchtune, issue 987)."""
    options = (
        "llama-2-70b --gpus 8xa100-80gb --method full --like torchtune --optimizer paged-adamw"
    )
    answers = [asked(f"{options} --accumulation {parts}") for parts in (1, 8)]
    assert [answer["verdict"] for answer in answers] == ["yes", "yes"]


def test_a_chunk_of_torchtune_is_an_eighth_of_the_tokens() -> None:
    """QLoRA of Llama 3.2 3B took 4.9 GB, more than without such chunks (torchtune's README)."""
    words = (
        "llama-3.2-3b --gpus a100-80gb --method qlora --like torchtune --micro-batch 2 --seq 4096"
    )
    plain, torchtune = (
        asked(f"{words} --accumulation 1 --set library={library}")["allocated_bytes"]
        for library in ("transformers", "native")
    )
    assert torchtune > plain


def test_a_large_quantised_base_fits_two_small_gpus_with_offload() -> None:
    """QLoRA of Llama 2 70B ran on two cards of 24 GB with FSDP's offload (axolotl, pull 1428)."""
    words = "llama-2-70b --gpus 2x3090 --method qlora --like axolotl --seq 512 --micro-batch 1"
    assert asked(words)["verdict"] != "yes"
    assert asked(f"{words} --offload yes")["verdict"] == "yes"


def test_gradients_of_earlier_micro_batches_stay_on_the_gpu() -> None:
    """LLaMA 7B took micro-batches of 2 on four A100-40, not of 3 (stanford_alpaca, issue 280)."""
    options = "llama-7b --gpus 4xa100-40gb --method full --like transformers --sharding full"
    options += " --seq 512 --offload yes --recompute none"
    one, several, larger = (
        asked(f"{options} --micro-batch {size} --accumulation {parts}")["peak_bytes"] / 2**30
        for size, parts in ((2, 1), (2, 8), (3, 8))
    )
    assert one < 15
    assert 32 < several < 35 < larger < 39


def test_an_offload_that_was_asked_for_has_its_host_memory() -> None:
    """500 GB were not enough for Llama 3.1 70B (torchtune, issue 1871)."""
    options = "llama-3.1-70b --gpus 8x4090 --method full --like torchtune --seq 1024 --offload yes"
    assert 600 < asked(options)["host_bytes"] / 2**30 < 900
    text = CliRunner().invoke(app, ["fits", *options.split()]).stdout
    assert "of 22.6 GiB on each GPU and 788 GiB of host memory" in text
