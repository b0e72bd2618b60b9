"""Workloads: global batches fixed by seed and step, and users' data and models."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.expand import expand
from bench.matrix import Host, Matrix
from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.host.packages import show
from harness.run.prepared import needs_at_least_as_much_as
from harness.workloads import DataSource, make_workload, prepare_data, workload_names
from harness.workloads.catalog import split_name
from harness.workloads.counts import model_facts
from harness.workloads.training_data import SPREAD_STEPS

EACH_KIND = pytest.mark.parametrize("name", ["llama-nano", "bert-micro", "resnet-micro"])


def data_of(name: str) -> DataSource:
    source = "images" if name.startswith("resnet") else "stdlib"
    return prepare_data(source, make_workload(name), 32)


@EACH_KIND
def test_shares_make_up_the_same_global_batch(name: str) -> None:
    """Pipeline stages before torch 2.12 expect inputs with the strides of a new tensor."""
    data = data_of(name)
    whole = data.batch(3, 5, 8, slice(0, 8))
    for shares in (2, 4, 8):
        size = 8 // shares
        parts = [data.batch(3, 5, 8, slice(i * size, (i + 1) * size)) for i in range(shares)]
        assert all(array.flags.c_contiguous for part in parts for array in part)
        for index in (0, 1):
            assert np.array_equal(np.concatenate([p[index] for p in parts]), whole[index])
    assert not np.array_equal(data.batch(3, 6, 8, slice(0, 8))[0], whole[0])
    assert not np.array_equal(data.batch(4, 5, 8, slice(0, 8))[0], whole[0])


def test_causal_labels_are_the_next_tokens() -> None:
    inputs, labels = prepare_data("stdlib", make_workload("llama-nano"), 32).batch(
        0, 0, 4, slice(0, 4)
    )
    assert inputs.shape == labels.shape == (4, 32)
    assert np.array_equal(inputs[:, 1:], labels[:, :-1])


def test_the_first_batches_name_the_whole_of_a_small_vocabulary() -> None:
    data = prepare_data("stdlib", make_workload("llama-nano"), 32)
    inputs = [data.batch(0, step, 8, slice(0, 8))[0] for step in range(13)]
    assert set(np.concatenate(inputs).flatten()) == set(range(256))
    assert data.batch(0, SPREAD_STEPS, 8, slice(0, 8))[0].max() < 128, "later ones are plain text"


def test_the_first_batches_name_all_parts_of_a_large_vocabulary() -> None:
    data = prepare_data("stdlib", make_workload("gpt2-small"), 64)
    inputs = np.concatenate([data.batch(0, step, 8, slice(0, 8))[0] for step in range(13)])
    parts = np.bincount(inputs.flatten() * 64 // 50257, minlength=64)
    assert (parts > 0).all()


@EACH_KIND
def test_a_batch_with_its_last_sample_first_holds_the_same_samples(name: str) -> None:
    data, rows = data_of(name), slice(0, 6)
    reversed_data = dataclasses.replace(data, last_first=True)
    for there, back in zip(
        data.batch(1, 2, 6, rows), reversed_data.batch(1, 2, 6, rows), strict=True
    ):
        assert (there[::-1] == back).all()
        torch.from_numpy(back)  # rejects views with negative strides


def test_the_default_data_is_this_pythons_standard_library() -> None:
    data = prepare_data("stdlib", make_workload("gpt2-nano"), 32)
    assert b"def " in data.tokens[:100000].tobytes()
    assert len(data.fingerprint) == 64
    assert data.fingerprint == prepare_data("stdlib", make_workload("llama-nano"), 64).fingerprint


def test_classes_are_packages() -> None:
    data = prepare_data("stdlib", make_workload("bert-micro"), 32)
    assert len(data.ranges) == 10
    _, labels = data.batch(0, 0, 64, slice(0, 64))
    assert set(labels) == set(range(10))


@pytest.mark.parametrize(
    "name", [n for n in workload_names() if n.split("-")[-1] in ("nano", "micro", "mini")]
)
def test_the_same_seed_gives_the_same_weights(name: str) -> None:
    workload = make_workload(name)
    one, two, other = workload.build(0), workload.build(0), workload.build(1)
    state = {k: v for k, v in one.state_dict().items() if v.is_floating_point()}
    assert all(torch.equal(v, two.state_dict()[k]) for k, v in state.items())
    assert any(not torch.equal(v, other.state_dict()[k]) for k, v in state.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2-small", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama-7b", 6_738_415_616),
        ("llama-8b", 8_030_261_248),
        ("bert-base", 109_489_930),
        ("resnet-50", 25_557_032),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-moe-30b", 30_532_122_624),
    ],
)
def test_sizes_are_the_published_ones(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = make_workload(name).build(0, saved_weights=False)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_flops_are_six_per_parameter_and_token_and_attention() -> None:
    """Kaplan et al. (arXiv 2001.08361): 6 N per token without embeddings; attention adds 12 x
    layers x hidden x tokens."""
    tokens = 64
    matrices = 3_344_640 - 256 * 256 - (2 * 4 + 1) * 256
    per_token = 6 * matrices + 12 * 4 * 256 * tokens
    assert model_facts(make_workload("llama-mini"), tokens).flops_per_sample == pytest.approx(
        per_token * tokens, rel=0.01
    )


def test_text_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes(b"call me ishmael " * 100)
    data = prepare_data(f"text:{file}", make_workload("llama-nano"), 32)
    inputs, _ = data.batch(0, SPREAD_STEPS, 2, slice(0, 2))
    assert bytes(inputs[0].astype(np.uint8)) in b"call me ishmael " * 100


def test_parquet_files_with_labels_are_read(tmp_path: Path) -> None:
    import pandas as pd

    file = tmp_path / "rows.parquet"
    pd.DataFrame({"text": ["a" * 100, "b" * 100, "a" * 100], "label": [0, 1, 0]}).to_parquet(file)
    inputs, labels = prepare_data(f"parquet:{file}", make_workload("bert-micro"), 32).batch(
        0, SPREAD_STEPS, 16, slice(0, 16)
    )
    for row, label in zip(inputs, labels, strict=True):
        assert set(row) <= {ord("ab"[label]), ord("\n")}


def test_hub_datasets_are_read_from_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pandas as pd

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    pd.DataFrame({"text": ["hello world " * 20]}).to_parquet(tmp_path / "set" / "train.parquet")
    data = prepare_data(f"hf:{tmp_path / 'set'}", make_workload("llama-nano"), 32)
    assert data.tokens.tobytes().startswith(b"hello world")


@pytest.mark.parametrize(
    ("name", "workload", "said"),
    [
        ("text:/no/such/file", "llama-nano", "there is no file"),
        ("hf:/no/such/set", "llama-nano", "could not be loaded"),
        ("poems", "llama-nano", "unknown data"),
        ("stdlib:", "llama-nano", "unknown data"),
        ("text:{small}", "llama-nano", "too few"),
        ("text:{small}", "bert-micro", "has no labels"),
        ("text:{small}", "resnet-micro", "classifies images"),
        ("parquet:{small}", "llama-nano", "not a readable parquet file"),
        ("parquet:{columns}", "llama-nano", "no column 'text'"),
    ],
)
def test_unusable_data_is_said(tmp_path: Path, name: str, workload: str, said: str) -> None:
    import pandas as pd

    small, columns = tmp_path / "small", tmp_path / "columns"
    small.write_text("short")
    pd.DataFrame({"body": ["x"]}).to_parquet(columns)
    with pytest.raises(UsageError, match=said):
        prepare_data(name.format(small=small, columns=columns), make_workload(workload), 32)


def test_a_saved_model_is_a_workload(tmp_path: Path) -> None:
    """Saved weights are trained; a folder with only a config gets seeded weights."""
    model = make_workload("gpt2-nano").build(5)
    model.save_pretrained(tmp_path / "model")
    workload = make_workload(f"hf:{tmp_path / 'model'}")
    assert (workload.kind, workload.blocks, workload.heads) == ("causal", 2, 2)
    assert workload.split is not None, "a known family can be split"
    built = workload.build(0)
    assert torch.equal(built.transformer.wte.weight, model.transformer.wte.weight)
    model.config.save_pretrained(tmp_path / "config")
    seeded = make_workload(f"hf:{tmp_path / 'config'}")
    assert torch.equal(seeded.build(5).transformer.wte.weight, model.transformer.wte.weight)


def test_a_saved_tokenizer_is_used(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    make_workload("gpt2-nano").build(5).save_pretrained(tmp_path / "model")
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "import": 1, "def": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(
        tmp_path / "model"
    )
    text = tmp_path / "text"
    text.write_text("import this def that " * 50)
    data = prepare_data(f"text:{text}", make_workload(f"hf:{tmp_path / 'model'}"), 32)
    assert data.tokens[:4].tolist() == [1, 0, 2, 0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no model config"),
        ('{"model_type": "vit", "architectures": ["ViTModel"]}', "AutoModelForImageClassification"),
    ],
)
def test_unusable_models_are_said(tmp_path: Path, content: str | None, said: str) -> None:
    if content:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=said):
        make_workload(f"hf:{tmp_path}")


# llama-mini: 4 blocks of 4 attention matrices of 256 x 256 and 3 MLP matrices of 256 x 704.
MATRICES = 4 * (4 * 256 * 256 + 3 * 256 * 704)
LORA = 4 * 8 * (4 * (256 + 256) + 3 * (256 + 704))
LSTM = (
    sum(2 * 4 * 256 * (width + 256 + 2) for width in (256, 512))
    + (512 * 512 + 512)
    + (512 * 256 + 256)
)


@pytest.mark.parametrize(
    ("suffix", "trained"),
    [
        ("lora", LORA),
        ("dora", LORA + 4 * (4 * 256 + 2 * 704 + 256)),
        ("prompt", 16 * 256),
        ("p_tuning", 16 * 256 + 3 * (256 * 256 + 256)),
        ("p_tuning_lstm", 16 * 256 + LSTM),
        ("prefix", 16 * 4 * 2 * 256),
        ("ia3", 4 * (256 + 256 + 704)),
        ("bf16", 3_344_640),
        ("nf4+lora", LORA),
    ],
)
def test_trained_parameters_of_variants_are_those_of_the_papers(suffix: str, trained: int) -> None:
    """LoRA (2106.09685) trains r (in + out), and DoRA (2402.09353) also a norm per output. Prefix
    tuning (2101.00190) trains tokens x 2 x layers x hidden; IA3 (2205.05638) keys, values, MLP."""
    facts = model_facts(make_workload(f"llama-mini+{suffix}"), 64)
    assert sum(facts.sizes) == trained
    assert facts.parameters == (3_344_640 if suffix == "bf16" else 3_344_640 + trained)
    assert facts.trained_bytes == trained * (2 if suffix == "bf16" else 4)


@pytest.mark.parametrize(
    ("suffix", "weights", "scales"),
    [
        ("lora", 4 * (3_344_640 + LORA), 0),
        ("bf16", 2 * 3_344_640, 0),
        ("int8+lora", 4 * (3_344_640 + LORA) - 3 * MATRICES, 4 * 4 * (4 * 256 + 2 * 704 + 256)),
        ("nf4+lora", 4 * (3_344_640 + LORA) - 3.5 * MATRICES, 4 * MATRICES / 64 + 28 * 16 * 4),
    ],
)
def test_stored_bytes_of_variants_are_counted(suffix: str, weights: float, scales: float) -> None:
    facts = model_facts(make_workload(f"llama-mini+{suffix}"), 64)
    rotary = 2 * 4 * 256 / 4 / 2
    assert (facts.parameter_bytes, facts.buffer_bytes) == (weights, scales + rotary)
    assert facts.scale_bytes == scales


def test_frozen_matrices_need_no_gradient_of_their_own() -> None:
    """Two of a matrix's three products remain, and all of attention."""
    whole, lora = (
        model_facts(make_workload(name), 64).flops_per_sample
        for name in ("llama-mini", "llama-mini+lora")
    )
    assert whole * 0.6 < lora < whole * 0.8


@pytest.mark.parametrize("suffix", ["lora", "p_tuning", "nf4+lora", "bf16"])
def test_a_variant_keeps_the_weights_of_its_name_and_seed(suffix: str) -> None:
    base = make_workload("llama-nano").build(3)
    one, two, other = (make_workload(f"llama-nano+{suffix}").build(seed) for seed in (3, 3, 4))
    embedding = next(p for n, p in one.named_parameters() if n.endswith("embed_tokens.weight"))
    assert torch.equal(
        embedding.float(), base.get_input_embeddings().weight.to(embedding.dtype).float()
    )
    trained = [n for n, p in one.named_parameters() if p.requires_grad]
    tensors, again, others = (dict(m.named_parameters()) for m in (one, two, other))
    assert all(torch.equal(p, again[n]) for n, p in tensors.items())
    assert any(not torch.equal(tensors[n], others[n]) for n in trained)


@pytest.mark.parametrize("name", ["llama-nano", "gpt2-nano"])
def test_prefixes_are_attended_to_with_and_without_a_cache(name: str) -> None:
    """peft passes the prefix as a key-value cache, even if the config disables it."""
    found = []
    for use_cache in (False, True):
        model = make_workload(f"{name}+prefix").build(0)
        model.config.use_cache = model.get_base_model().config.use_cache = use_cache
        logits = make_workload(f"{name}+prefix").logits(model, torch.arange(64).view(2, 32))
        logits.logsumexp(-1).sum().backward()
        gradients = [p.grad for p in model.parameters() if p.requires_grad]
        assert all(g is not None and float(g.norm()) > 0 for g in gradients)
        found.append((logits, *gradients))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    plain = make_workload(name)
    assert not torch.allclose(
        plain.logits(plain.build(0), torch.arange(64).view(2, 32)), found[0][0]
    )


def test_virtual_tokens_predict_nothing() -> None:
    """Only logits of real tokens remain; each depends on its own and earlier tokens."""
    workload = make_workload("llama-nano+prompt")
    model = workload.build(0).eval()
    tokens = torch.arange(32)[None]
    changed = torch.cat([tokens[:, :-1], tokens[:, -1:] + 1], 1)
    before, after = workload.logits(model, tokens), workload.logits(model, changed)
    assert before.shape == (1, 32, 256)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])
    assert workload.max_tokens == make_workload("llama-nano").max_tokens - 16


@pytest.mark.parametrize(
    "name",
    [
        "llama-nano+qlora",
        "llama-nano+",
        "llama-nano+int8",
        "llama-nano+nf4+int8+lora",
        "llama-nano+lora+ia3",
        "llama-nano+lora+nf4",
        "bert-micro+lora",
        "mixtral-nano+lora",
        "resnet-micro+bf16",
        "poems+lora",
    ],
)
def test_suffixes_that_mean_nothing_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        make_workload(name)


def test_a_path_may_have_a_plus_sign(tmp_path: Path) -> None:
    folder = tmp_path / "a+lora"
    assert split_name(f"hf:{folder}+bf16+lora") == (f"hf:{tmp_path}/a", ["lora", "bf16", "lora"])
    folder.mkdir()
    assert split_name(f"hf:{folder}") == (f"hf:{folder}", [])
    assert split_name(f"hf:{folder}+bf16+lora") == (f"hf:{folder}", ["bf16", "lora"])
    assert split_name("hf:some/c++") == ("hf:some/c++", [])


@pytest.mark.parametrize(
    ("missing", "left"),
    [
        ("peft", {"llama-nano", "llama-nano+bf16"}),
        ("bitsandbytes", {"llama-nano", "llama-nano+bf16", "llama-nano+lora"}),
    ],
)
def test_without_a_library_exactly_its_variants_are_unavailable(
    monkeypatch: pytest.MonkeyPatch, missing: str, left: set[str]
) -> None:
    suffixes = ("", "+bf16", "+lora", "+nf4+lora", "+int8+lora")
    names = [f"llama-nano{suffix}" for suffix in suffixes]
    matrix = Matrix(cells=[{"strategy": "single", "workload": names}])
    host = Host("cpu", 2, 2**34)
    assert len(expand(matrix, host).cells) == 5
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *rest: None if name == missing else found(name, *rest),
    )
    expanded = expand(matrix, host)
    assert {cell.workload for cell in expanded.cells} == left
    assert {x.cell.workload for x in expanded.left_out} == set(names) - left
    for one in expanded.left_out:
        assert one.status == "unavailable"
        assert f"pip install 'parallelism-bench[{missing}]'" in one.reason


def test_a_matrix_names_variants_of_its_workloads() -> None:
    matrix = Matrix(
        workloads={"main": "llama-nano"},
        cells=[{"strategy": "single", "workload": ["main+lora", "gpt2-nano+bf16", "main"]}],
    )
    cells = expand(matrix, Host("cpu", 2, 2**34)).cells
    assert [cell.workload for cell in cells] == ["llama-nano+lora", "gpt2-nano+bf16", "llama-nano"]


def test_a_variant_that_ran_out_of_memory_says_nothing_about_another() -> None:
    small, large = (
        Cell(strategy="single", workload=f"llama-{size}+lora") for size in ("nano", "micro")
    )
    assert needs_at_least_as_much_as(large, small)
    assert not needs_at_least_as_much_as(
        Cell(strategy="single", workload="llama-micro+nf4+lora"), small
    )
    assert not needs_at_least_as_much_as(large, Cell(strategy="single", workload="llama-nano"))


@pytest.mark.parametrize("name", ["mixtral-nano", "qwen3-moe-nano"])
def test_flops_of_experts_match_those_counted_by_hand(name: str) -> None:
    """The backward pass takes twice the operations of the forward pass. Each of two blocks has four
    projections of 32 by 32, and attention over 16 tokens. A router of four experts and three
    matrices of 32 by 48 in two experts follow, then 256 logits. Some versions of transformers also
    compute rotary angles by a product, 256 of 3.6 million operations."""
    tokens, hidden = 16, 32
    projections, router, experts = 4 * hidden**2, 4 * hidden, 2 * 3 * hidden * 48
    block = 2 * tokens * (projections + router + experts) + 4 * tokens**2 * hidden
    forward = 2 * block + 2 * tokens * hidden * 256
    counted = model_facts(make_workload(name), tokens).flops_per_sample
    assert counted == pytest.approx(3 * forward, rel=1e-4)


@pytest.mark.parametrize(("recipe", "same"), [("rowwise", True), ("tensorwise", False)])
def test_products_in_float8_do_not_depend_on_which_rank_has_a_sample(
    recipe: str, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale per row depends on one token; one scale for all rows depends on a rank's samples, so
    that two ranks train another model than one process."""
    show("torchao")
    float8 = pytest.importorskip("torchao.float8", reason="make setup installs torchao")
    config = float8.Float8LinearConfig
    make = config.from_recipe_name
    if not same:
        monkeypatch.setattr(config, "from_recipe_name", lambda name: make(recipe))
    workload = make_workload("llama-nano+float8")
    model = workload.build(0)
    inputs = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together = workload.logits(model, inputs)
        apart = torch.cat([workload.logits(model, half) for half in inputs.split(1)])
    assert (float((together - apart).abs().max()) < 1e-5) == same
