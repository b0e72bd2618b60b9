"""Random configs of models and parquet files: each is used, or refused in one sentence.

FUZZ=20000 tries at least so many of each.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bench.host import Host, admit_here
from harness.planner.cluster.model_names import parse_shape
from harness.spec.cell import Cell
from harness.spec.errors import Refused, UsageError
from harness.workloads import make_workload, prepare_data
from tests.faults.test_fuzz import fuzzed
from tests.tiny_models import MODELS, MORE_MODELS

pytestmark = pytest.mark.filterwarnings("default")
ALL = MODELS | MORE_MODELS
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([None, True, 0, -1, 1, 3, 2**31, 10**10, 10**30, 0.5, -0.0, "4", "", [], {}]),
    st.just([4, "x"]),
    st.just({"0": None}),
    st.integers(),
    st.text(max_size=5),
    st.floats(),
)
KEYS = (
    *("model_type", "architectures", "num_labels", "id2label", "problem_type", "dtype"),
    *("rope_parameters", "layer_types", "text_config", "hidden_act", "pad_token_id", "drop"),
    *("is_encoder_decoder", "quantization_config", "auto_map", "tie_word_embeddings"),
)


@st.composite
def configs(draw: st.DrawFn) -> str:
    """A tiny config of a model, with some entries changed or missing, perhaps cut off."""
    model = draw(st.sampled_from(sorted(ALL)))
    architecture, sizes = ALL[model]
    entries = {**sizes, "model_type": model, "architectures": [architecture]}
    for key in draw(st.lists(st.sampled_from([*entries, *KEYS]), max_size=3)):
        if draw(st.booleans()):
            entries[key] = draw(VALUES)
        else:
            entries.pop(key, None)
    text = json.dumps(entries)
    return text if draw(st.integers(0, 9)) else text[: draw(st.integers(0, len(text)))]


@fuzzed(inputs=3)
@given(text=configs())
@example(text='{"model_type": "llama", "num_labels": 100000000000}')
@example(text='{"model_type": "bert", "num_hidden_layers": 100000000000}')
def test_a_config_of_a_model(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(text)
    name = f"hf:{folder}"
    with contextlib.suppress(UsageError):
        assert parse_shape(name).parameters > 0
    with contextlib.suppress(UsageError, Refused):
        workload = make_workload(name)
        data = "images" if workload.kind == "image" else "stdlib"
        axes = {"workload": name, "sequence_length": 16, "data": data, "device": "cpu"}
        with mock.patch("bench.host.model_facts"):  # whose every error is caught; it takes seconds
            admit_here(Cell(strategy="single", devices=1, **axes), Host("cpu", 2, 2**34))


ROWS = 5
COLUMNS = st.one_of(
    *(
        st.lists(st.none() | of, min_size=ROWS, max_size=ROWS)
        for of in (
            st.text(max_size=40),
            st.just("a" * 40),
            st.integers(-2, 3),
            st.integers(0, 2**63 - 1),
            st.booleans(),
            st.floats(),
            st.binary(max_size=5),
            st.lists(st.text(max_size=3), max_size=2),
            st.fixed_dictionaries({"a": st.integers(0, 5)}),
            st.datetimes(),
        )
    )
)
NAMES = st.sampled_from(["text", "text", "label", "label", "Text", "labels", ""])


@fuzzed(inputs=2, share=2)
@given(columns=st.lists(st.tuples(NAMES, COLUMNS), max_size=3), cut=st.integers(0, 40))
def test_a_parquet_file_of_samples(
    columns: list[tuple[str, list[Any]]], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("samples") / "samples.parquet"
    arrays = [pa.array(values) for _, values in columns]
    pq.write_table(pa.Table.from_arrays(arrays, names=[name for name, _ in columns]), file)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) - max(0, cut - 30)])
    for workload in ("bert-nano", "llama-nano"):
        with contextlib.suppress(UsageError):
            data = prepare_data(f"parquet:{file}", make_workload(workload), 8)
            assert len(data.batch(0, 0, 4, slice(0, 4))[0]) == 4
