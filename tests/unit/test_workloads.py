"""Step k of seed s is the same global batch for everyone; a user's own data and models are loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.errors import Mistake
from harness.workloads import make_workload, prepare_data, workload_names
from harness.workloads.facts import model_facts


@pytest.mark.parametrize("name", ["llama-nano", "bert-micro", "resnet-micro"])
def test_shares_make_up_the_same_global_batch(name: str) -> None:
    data = prepare_data("images" if name.startswith("resnet") else "stdlib", make_workload(name), 32)
    whole = data.batch(3, 5, 8, slice(0, 8))
    for shares in (2, 4, 8):
        size = 8 // shares
        parts = [data.batch(3, 5, 8, slice(i * size, (i + 1) * size)) for i in range(shares)]
        for index in (0, 1):
            assert np.array_equal(np.concatenate([p[index] for p in parts]), whole[index])
    assert not np.array_equal(data.batch(3, 6, 8, slice(0, 8))[0], whole[0])
    assert not np.array_equal(data.batch(4, 5, 8, slice(0, 8))[0], whole[0])


def test_causal_labels_are_the_next_tokens() -> None:
    inputs, labels = prepare_data("stdlib", make_workload("llama-nano"), 32).batch(0, 0, 4, slice(0, 4))
    assert inputs.shape == labels.shape == (4, 32)
    assert np.array_equal(inputs[:, 1:], labels[:, :-1])


def test_the_default_data_is_this_pythons_standard_library() -> None:
    data = prepare_data("stdlib", make_workload("gpt2-nano"), 32)
    assert data.token_dtype == "bytes"
    assert b"def " in data.tokens[:100000].tobytes()
    assert len(data.fingerprint) == 64
    assert data.fingerprint == prepare_data("stdlib", make_workload("llama-nano"), 64).fingerprint


def test_classes_are_packages() -> None:
    data = prepare_data("stdlib", make_workload("bert-micro"), 32)
    assert len(data.ranges) == 10
    _, labels = data.batch(0, 0, 64, slice(0, 64))
    assert set(labels) == set(range(10))


@pytest.mark.parametrize("name", [n for n in workload_names() if n.split("-")[1] in ("nano", "micro", "mini")])
def test_the_same_seed_gives_the_same_weights(name: str) -> None:
    import torch

    workload = make_workload(name)
    one, two, other = workload.build(0), workload.build(0), workload.build(1)
    state = {k: v for k, v in one.state_dict().items() if v.is_floating_point()}
    assert all(torch.equal(v, two.state_dict()[k]) for k, v in state.items())
    assert any(not torch.equal(v, other.state_dict()[k]) for k, v in state.items())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2-small", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama-7b", 6_738_415_616),
        ("bert-base", 109_489_930),
        ("resnet-50", 25_557_032),
    ],
)
def test_sizes_are_the_published_ones(name: str, parameters: int) -> None:
    assert model_facts(make_workload(name), 32).parameters == parameters


def test_flops_are_six_per_parameter_and_token_and_attention() -> None:
    """Kaplan et al. (arXiv 2001.08361): 6 N per token without embeddings; attention adds 12 x layers x hidden x tokens."""
    tokens = 64
    matrices = 3_344_640 - 256 * 256 - (2 * 4 + 1) * 256
    per_token = 6 * matrices + 12 * 4 * 256 * tokens
    assert model_facts(make_workload("llama-mini"), tokens).flops_per_sample == pytest.approx(per_token * tokens, rel=0.01)


def test_text_files(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes(b"call me ishmael " * 100)
    data = prepare_data(f"text:{file}", make_workload("llama-nano"), 32)
    inputs, _ = data.batch(0, 0, 2, slice(0, 2))
    assert bytes(inputs[0].astype(np.uint8)) in b"call me ishmael " * 100


def test_parquet_files_with_labels(tmp_path: Path) -> None:
    import pandas as pd

    file = tmp_path / "rows.parquet"
    pd.DataFrame({"text": ["a" * 100, "b" * 100, "a" * 100], "label": [0, 1, 0]}).to_parquet(file)
    inputs, labels = prepare_data(f"parquet:{file}", make_workload("bert-micro"), 32).batch(0, 0, 16, slice(0, 16))
    for row, label in zip(inputs, labels, strict=True):
        assert set(row) <= {ord("ab"[label]), ord("\n")}


def test_hub_datasets_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        ("text:{small}", "resnet-micro", "generated images only"),
        ("parquet:{small}", "llama-nano", "not a readable parquet file"),
        ("parquet:{columns}", "llama-nano", "no column 'text'"),
    ],
)
def test_unusable_data_is_said(tmp_path: Path, name: str, workload: str, said: str) -> None:
    import pandas as pd

    small, columns = tmp_path / "small", tmp_path / "columns"
    small.write_text("short")
    pd.DataFrame({"body": ["x"]}).to_parquet(columns)
    with pytest.raises(Mistake, match=said):
        prepare_data(name.format(small=small, columns=columns), make_workload(workload), 32)


def test_a_saved_model_is_a_workload(tmp_path: Path) -> None:
    """A user's own weights are trained, not new ones; a folder with a config alone gets seeded weights."""
    import torch

    model = make_workload("gpt2-nano").build(5)
    model.save_pretrained(tmp_path / "model")
    workload = make_workload(f"hf:{tmp_path / 'model'}")
    assert (workload.kind, workload.blocks, workload.heads) == ("causal", 2, 2)
    assert workload.split is not None, "a family that is known can be split"
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
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(tmp_path / "model")
    text = tmp_path / "text"
    text.write_text("import this def that " * 50)
    data = prepare_data(f"text:{text}", make_workload(f"hf:{tmp_path / 'model'}"), 32)
    assert data.tokens[:4].tolist() == [1, 0, 2, 0]


@pytest.mark.parametrize(
    ("content", "said"), [(None, "no model config"), ('{"model_type": "vit", "architectures": ["ViTModel"]}', "neither")]
)
def test_unusable_models_are_said(tmp_path: Path, content: str | None, said: str) -> None:
    if content:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(Mistake, match=said):
        make_workload(f"hf:{tmp_path}")
