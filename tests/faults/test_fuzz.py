"""Random inputs to everything that reads what somebody else may have written: each is read, or
refused in one sentence. FUZZ=20000 tries so many of each."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.cli import app
from bench.cli.run_plan import parse_precision, parse_share, parse_time
from bench.cluster.site import read_site
from bench.expand import expand
from bench.host import Host, host_of
from bench.matrix import parse_changes, read_matrix
from harness.nodes.messages import ProtocolError, decoded, encoded
from harness.record.files import DamagedFile, NewerSchema, read_file
from harness.record.plan import Plan
from harness.record.run import RunRecord
from harness.record.store import Store
from harness.spec.cell import Cell
from harness.spec.errors import UsageError
from harness.spec.redaction import redacted
from tests.unit.stored_trials import one_cell_run

pytestmark = pytest.mark.filterwarnings("default")
fuzzed = settings(
    max_examples=int(os.environ.get("FUZZ", "30")),
    deadline=None,
    database=None,
    derandomize="FUZZ" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
TEXT = st.text(max_size=30)
WORDS = st.sampled_from(
    [
        *Cell.model_fields,
        *("cells", "defaults", "trials", "hosts", "strategy", "ddp", "llama-nano", "options"),
        *("many", "2GiB", "-1", "1e400", "../..", "text:/etc/passwd", "\0", "a" * 300),
    ]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 9)
    | st.floats()
    | TEXT
    | WORDS
    | st.just([])
    | st.just({})
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | TEXT, inner, max_size=3),
    max_leaves=8,
)
AXES = st.dictionaries(st.sampled_from([*Cell.model_fields]) | TEXT, VALUES, max_size=5)


@fuzzed
@given(content=VALUES | st.fixed_dictionaries({"cells": st.lists(AXES, max_size=2)}), text=TEXT)
def test_a_matrix_file(content: Any, text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    for written in (yaml.safe_dump(content), text):
        file.write_bytes(written.encode("utf-8", "surrogatepass"))
        with contextlib.suppress(UsageError):
            expand(read_matrix(str(file)), Host("cpu", 2, 2**34))


@fuzzed
@given(axes=AXES)
def test_a_cell(axes: dict[str, Any]) -> None:
    with contextlib.suppress(ValueError):  # pydantic's, which callers put in words
        assert Cell(**axes).id


@fuzzed
@given(words=st.lists(WORDS | TEXT | st.builds("{}={}".format, WORDS, TEXT), max_size=2), text=TEXT)
def test_values_of_options(words: list[str], text: str) -> None:
    for parse in (parse_precision, parse_share, parse_time, lambda host: host_of(host, 1)):
        with contextlib.suppress(UsageError):
            parse(text)
    with contextlib.suppress(UsageError):
        parse_changes(words)


OPTIONS = st.sampled_from(["--json", "--run", "--results", "--matrix", "--set", "--only", "-x"])
COMMANDS = st.sampled_from(["show", "status", "compare", "history", "check"])


@pytest.fixture(scope="module")
def nowhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, which is empty."""
    before, folder = Path.cwd(), tmp_path_factory.mktemp("nowhere")
    os.chdir(folder)
    yield folder
    os.chdir(before)


@fuzzed
@given(command=COMMANDS, words=st.lists(OPTIONS | WORDS | TEXT, max_size=3))
def test_arguments_of_commands(command: str, words: list[str], nowhere: Path) -> None:
    """In a folder without results: a sentence of the suite's own or of the parser's."""
    group = typer.main.get_command(app)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            group.main([command, *words], standalone_mode=False)
        except (UsageError, SystemExit, typer.Exit, typer.Abort):
            pass
        except Exception as error:
            if not type(error).__module__.startswith(("click", "typer")):
                raise
    assert list(nowhere.iterdir()) == []


@fuzzed
@given(content=VALUES, text=TEXT)
def test_a_site_file(content: Any, text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "site.yaml"
    for written in (yaml.safe_dump(content), text):
        file.write_bytes(written.encode("utf-8", "surrogatepass"))
        with contextlib.suppress(UsageError):
            read_site(file)


@fuzzed
@given(plan=VALUES, text=TEXT)
def test_a_plan(plan: Any, text: str) -> None:
    whole = json.loads(one_cell_run()["plan"])
    changed = whole | plan if isinstance(plan, dict) else plan
    for written in (json.dumps(plan), json.dumps(changed), text):
        with contextlib.suppress(UsageError):
            Plan.from_row({"run_id": "run-1", "matrix": "m", "plan": written})


@fuzzed
@given(noise=st.binary(max_size=200), value=VALUES, word=WORDS | TEXT)
def test_a_message_of_the_agents(noise: bytes, value: Any, word: str) -> None:
    for body in (noise, json.dumps([word, value]).encode(), json.dumps(["run", value]).encode()):
        with contextlib.suppress(ProtocolError):
            decoded(body)
    with contextlib.suppress(ProtocolError):
        decoded(noise + encoded("stop"))


@pytest.fixture(scope="module")
def good_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = Store(tmp_path_factory.mktemp("results"))
    store.write_run(RunRecord(**one_cell_run()))
    return store.folder / "runs" / "run-1.parquet"


@fuzzed
@given(
    begin=st.integers(0, 12_000),
    noise=st.binary(min_size=1, max_size=20),
    cut=st.sampled_from([0, 1, 4, 100]),
)
def test_a_parquet_file(begin: int, noise: bytes, cut: int, good_file: Path) -> None:
    content = bytearray(good_file.read_bytes())
    content[begin : begin + len(noise)] = noise
    file = good_file.with_name("fuzzed.parquet")
    file.write_bytes(content[: len(content) - cut])
    with contextlib.suppress(DamagedFile, NewerSchema):
        read_file("runs", file)


@fuzzed
@given(text=TEXT, secret=st.text(min_size=8, max_size=20), value=VALUES)
def test_redaction(text: str, secret: str, value: Any) -> None:
    """What is JSON stays JSON, and a secret does not survive in it."""
    shown = redacted(json.dumps(value), ())
    json.loads(shown)
    if secret not in "[redacted]" and text not in secret:
        assert secret not in redacted(text + secret + text, (secret,))
