"""Random model configs and parquet files: each is used, or refused in one sentence.

FUZZ=20000 tries at least 20,000 of each.
"""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
from collections.abc import Iterator
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given

from bench.matrix import Host, admit_here
from harness.cell.cell import Cell
from harness.cell.errors import Refused, UsageError
from harness.host.folders import cache_folder
from harness.planner.cluster.hf_config import parse_shape
from harness.workloads import Workload, make_workload, prepare_data
from harness.workloads.catalog import require_kind
from harness.workloads.pretrained import read_config
from tests.faults.test_fuzz import SEEDS, fuzzed, mutated
from tests.tiny_models import MODELS, MORE_MODELS

pytestmark = pytest.mark.filterwarnings("default")
ALL = MODELS | MORE_MODELS
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 10**10, 10**30, 0.5, -0.0, 1e300),
    *(float("nan"), float("inf"), "4", "", "gelu", "x" * 300, "\0", "\ud800", [], {}, [4, "x"]),
    *([None], [[]], [1, 2], {"0": None}, {"a": {"b": []}}, {"rope_type": "yarn"}, [0.5], ["full"]),
]
KEYS = (
    *("model_type", "architectures", "num_labels", "id2label", "problem_type", "dtype"),
    *("rope_parameters", "rope_theta", "layer_types", "text_config", "hidden_act", "drop"),
    *("is_encoder_decoder", "quantization_config", "auto_map", "tie_word_embeddings"),
    *("pad_token_id", "attention_dropout", "initializer_range", "torch_dtype", "num_experts"),
    *("sliding_window", "label2id", "transformers_version", "_attn_implementation", "is_decoder"),
)
CONFIGS = 20
"""Configs per example, one of which is built and trained."""
FILES = 20


def value(chance: random.Random) -> Any:
    kinds = (
        lambda: chance.choice(VALUES),
        lambda: chance.randint(-5, 70),
        lambda: chance.choice((chance.random(), -chance.random(), chance.randint(0, 2**63))),
        lambda: "".join(chance.choices("az09._- é\n/", k=chance.randint(0, 5))),
    )
    return chance.choice(kinds)()


def config_texts(seed: int, count: int) -> Iterator[str]:
    """Yields tiny model configs with changed or missing entries, some of them damaged."""
    chance = random.Random(seed)
    for _ in range(count):
        model = chance.choice(sorted(ALL))
        architecture, sizes = ALL[model]
        entries: dict[str, Any] = {**sizes, "model_type": model, "architectures": [architecture]}
        for _ in range(chance.choice((0, 1, 1, 1, 2, 2, 3))):
            key = chance.choice([*entries, *KEYS])
            if chance.randrange(4):
                entries[key] = value(chance)
            else:
                entries.pop(key, None)
        text = json.dumps(entries)
        if not chance.randrange(8):
            text = next(mutated(text.encode(), chance.randrange(2**32), 1)).decode(errors="replace")
        yield text


def require_read(folder: Path) -> None:
    """Reads a config as every command does first, without building its model."""
    name = f"hf:{folder}"
    with contextlib.suppress(UsageError):
        require_kind(name, read_config(name, str(folder)))
    with (
        contextlib.suppress(UsageError),
        mock.patch("harness.planner.cluster.hf_config.is_installed", return_value=False),
    ):
        assert parse_shape(name).parameters > 0


def require_built(folder: Path) -> None:
    """Builds a config's model and computes its loss."""
    name = f"hf:{folder}"
    with contextlib.suppress(UsageError):
        assert parse_shape(name).parameters > 0
    with contextlib.suppress(UsageError, Refused):
        workload = make_workload(name)
        data = "images" if workload.kind == "image" else "stdlib"
        axes = {"workload": name, "sequence_length": 16, "data": data, "device": "cpu"}
        with mock.patch("bench.matrix.model_facts"):  # slow, and catches every error
            admit_here(Cell(strategy="single", devices=1, **axes), Host("cpu", 2, 2**34))


def try_configs(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for text in config_texts(seed, CONFIGS):
            Path(folder, "config.json").write_text(text, errors="replace")
            require_read(Path(folder))
        require_built(Path(folder))
    make_workload.cache_clear()


@fuzzed(inputs=CONFIGS)
@given(seed=SEEDS)
def test_a_random_config_of_a_model_is_read_or_refused(seed: int) -> None:
    try_configs(seed)


@pytest.mark.parametrize(
    "text",
    [
        '{"model_type": "llama", "num_labels": 100000000000}',
        '{"model_type": "bert", "num_hidden_layers": 100000000000}',
        '{"model_type": "bert", "hidden_size": 24, "vocab_size": 256, "initializer_range": -0.2}',
    ],
)
def test_a_config_that_ended_in_a_traceback(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    require_read(tmp_path)
    require_built(tmp_path)


NAMES = ("text", "text", "text", "label", "label", "Text", "labels", "")


def column(chance: random.Random, rows: int) -> pa.Array:
    """Returns values of one type, perhaps with nulls."""
    kinds = (
        (pa.string(), lambda: "é" * chance.randint(0, 40)),
        (pa.string(), lambda: "a" * 40),
        (pa.string(), lambda: "a" * 40),
        (pa.int64(), lambda: chance.randint(-2, 9)),
        (pa.int64(), lambda: chance.randint(0, 3)),
        (pa.int64(), lambda: chance.randint(0, 3)),
        (pa.uint64(), lambda: chance.randint(0, 2**64 - 1)),
        (pa.bool_(), lambda: chance.random() < 0.5),
        (pa.float64(), lambda: chance.choice((0.0, 1.0, float("nan"), chance.random()))),
        (pa.binary(), lambda: chance.randbytes(5)),
        (pa.list_(pa.string()), lambda: ["a"] * chance.randint(0, 2)),
        (pa.struct({"a": pa.int64()}), lambda: {"a": chance.randint(0, 5)}),
        (pa.timestamp("ns"), lambda: datetime(2020, 1, 1) + timedelta(chance.random())),
        (pa.decimal128(9, 2), lambda: Decimal(chance.randint(0, 99))),
        (pa.null(), lambda: None),
    )
    of, one = chance.choice(kinds)
    missing = chance.choice((0.0, 0.0, 0.2))
    values = [None if chance.random() < missing else one() for _ in range(rows)]
    array = pa.array(values, of)
    if of == pa.binary() and chance.random() < 0.5:
        return array.view(pa.string())  # not UTF-8
    if of in (pa.string(), pa.int64()) and chance.random() < 0.2:
        return array.dictionary_encode()
    return array


def write_samples(file: Path, chance: random.Random) -> None:
    """Writes a parquet file of random columns, perhaps damaged."""
    rows = chance.choice((0, 1, 5, 5, 5))
    names = chance.choice(
        (["text"], ["text", "label"], ["text", "label"], chance.choices(NAMES, k=3))
    )
    table = pa.Table.from_arrays([column(chance, rows) for _ in names], names=names)
    pq.write_table(table, file, compression=chance.choice(("none", "snappy")))
    content = file.read_bytes()
    damage = chance.randrange(8)
    if damage == 0:
        file.write_bytes(content[: chance.randrange(len(content))])
    elif damage == 1:
        file.write_bytes(next(mutated(content, chance.randrange(2**32), 1)))


def require_samples(file: Path, workload: Workload) -> None:
    with contextlib.suppress(UsageError):
        # Bypasses the cache, whose key is the file's name.
        data = prepare_data.__wrapped__(f"parquet:{file}", workload, 8)
        assert len(data.batch(0, 0, 4, slice(0, 4))[0]) == 4


def try_samples(seed: int) -> None:
    chance = random.Random(seed)
    before = set((cache_folder() / "data").glob("*"))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(FILES):
            file = Path(folder, f"{number}.parquet")
            write_samples(file, chance)
            require_samples(file, make_workload(chance.choice(("bert-micro", "llama-nano"))))
    for cached in set((cache_folder() / "data").glob("*")) - before:
        cached.unlink()


@fuzzed(inputs=FILES)
@given(seed=SEEDS)
def test_a_random_parquet_file_of_samples_is_read_or_refused(seed: int) -> None:
    try_samples(seed)
