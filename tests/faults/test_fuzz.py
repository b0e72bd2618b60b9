"""Random inputs to everything that reads foreign data: each is read, or refused in one sentence.
FUZZ=20000 tries at least 20,000 of each, and a million in all."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.cli import app, refusal
from bench.cluster.site import read_site
from bench.expand import expand
from bench.matrix import Host, host_of, parse_changes, read_matrix
from bench.run_options import parse_share, parse_time
from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.cell.redaction import redacted
from harness.nodes.protocol import ProtocolError, decoded, encoded
from harness.planner.cluster.calibration import DEFAULT
from harness.planner.cluster.calibration import load as load_constants
from harness.planner.cluster.hardware import cluster_of
from harness.planner.cluster.hf_config import parse_shape
from harness.planner.cluster.question import ClusterQuestion
from harness.record.files import DamagedFile, OtherSchema, read_file
from harness.record.plan import Plan
from harness.record.run_record import RunRecord
from harness.record.store import Store
from harness.worker.spec import TrialSpec
from harness.workloads import DataSource
from tests.unit.stored_trials import one_cell_run

pytestmark = pytest.mark.filterwarnings("default")
FUZZ = int(os.environ.get("FUZZ", "30"))


def fuzzed(inputs: int, share: int = 1) -> settings:
    """Returns settings for `share` times FUZZ inputs, of which each example tries `inputs`."""
    return settings(
        max_examples=max(10, FUZZ * share // inputs),
        database=None,
        derandomize="FUZZ" not in os.environ,
        suppress_health_check=list(HealthCheck),
    )


SEEDS = st.integers(0, 2**32)
ODD = (b"", b"\0", b"-1", b"1e999", b"\xff\xfe", b"{" * 50, b"\n- " * 5, b"&a [*a]", b"../" * 9)


def mutated(content: bytes, seed: int, count: int) -> Iterator[bytes]:
    """Yields `count` versions of valid content, with some places changed, cut out, repeated or
    filled with odd bytes."""
    chance = random.Random(seed)
    for _ in range(count):
        changed = bytearray(content)
        for _ in range(chance.randint(1, 4)):
            begin = chance.randrange(len(changed) + 1)
            end = min(len(changed), begin + chance.choice((0, 1, 1, 4, 20)))
            kind = chance.randrange(3)
            filling = (chance.choice(ODD), changed[begin:end] * 2, chance.randbytes(end - begin))
            changed[begin:end] = filling[kind]
        yield bytes(changed)


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


def as_written(*texts: str) -> list[bytes]:
    return [text.encode("utf-8", "surrogatepass") for text in texts]


MATRIX = b"""trials: 2
numbers: {many: 4}
defaults: {workload: llama-nano, batch: 8, devices: 2}
cells:
  - {strategy: [single, ddp], micro_batches: [1, many]}
  - {strategy: pipeline, options: {schedule: gpipe}, hosts: cpu}
"""


@fuzzed(inputs=4)
@given(
    content=VALUES | st.fixed_dictionaries({"cells": st.lists(AXES, max_size=2)}),
    text=TEXT,
    seed=SEEDS,
)
def test_a_random_matrix_file_is_read_or_refused(
    content: Any, text: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    for written in (*as_written(yaml.safe_dump(content), text), *mutated(MATRIX, seed, 2)):
        file.write_bytes(written)
        with contextlib.suppress(UsageError):
            expand(read_matrix(str(file)), Host("cpu", 2, 2**34))


@fuzzed(inputs=1, share=2)
@given(axes=AXES)
def test_a_random_cell_is_accepted_or_refused(axes: dict[str, Any]) -> None:
    with contextlib.suppress(ValueError):  # pydantic's, which callers translate
        assert Cell(**axes).id


@fuzzed(inputs=21, share=6)
@given(
    words=st.lists(WORDS | TEXT | st.builds("{}={}".format, WORDS, TEXT), max_size=2),
    text=TEXT,
    seed=SEEDS,
)
def test_random_values_of_options_are_accepted_or_refused(
    words: list[str], text: str, seed: int
) -> None:
    for good, parse in (
        (b"1/4", parse_share),
        (b"45min", parse_time),
        (b"8 x h100-80gb", lambda host: host_of(host, 1)),
    ):
        changed = (written.decode("utf-8", "replace") for written in mutated(good, seed, 4))
        for value in (text, *changed):
            with contextlib.suppress(UsageError):
                parse(value)
    with contextlib.suppress(UsageError):
        parse_changes(words)


OPTIONS = st.sampled_from(["--json", "--run", "--results", "--matrix", "--set", "--only", "-x"])
COMMANDS = st.sampled_from(["show", "status", "compare", "compare --history", "doctor"])
GROUP = typer.main.get_command(app)


@pytest.fixture(scope="module")
def nowhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty current folder."""
    before, folder = Path.cwd(), tmp_path_factory.mktemp("nowhere")
    os.chdir(folder)
    yield folder
    os.chdir(before)


@fuzzed(inputs=1)
@given(command=COMMANDS, words=st.lists(OPTIONS | WORDS | TEXT, max_size=3))
def test_random_arguments_of_commands_never_end_in_a_traceback(
    command: str, words: list[str], nowhere: Path
) -> None:
    """Wrong arguments end in a message of the suite or of its parser, and leave no files."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            GROUP.main([*command.split(), *words], standalone_mode=False)
        except (SystemExit, typer.Exit, typer.Abort):
            pass
        except Exception as error:
            if not refusal(error) and not type(error).__module__.startswith(("click", "typer")):
                raise
    assert list(nowhere.iterdir()) == []


PLAN_WORDS = st.sampled_from(
    [
        *("llama-8b", "layers", "hidden", "heads", "hf:/etc/passwd", "hf:", "nvlink", "pcie", ","),
        *("400gbit", "450gbyte", "0gbit", "playbook-h100", "h100-80gb", "rtx-4090", "=", "9" * 30),
    ]
)
CONSTANTS = DEFAULT.read_bytes()
MODEL = b"layers=32,hidden=4096,heads=32,vocabulary=32000"


@fuzzed(inputs=12, share=4)
@given(parts=st.lists(PLAN_WORDS | TEXT, max_size=4), number=st.integers(-2, 10**6), seed=SEEDS)
def test_random_arguments_of_plan_never_end_in_a_traceback(
    parts: list[str], number: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Covers the model, the device, its links, numbers of devices and samples, and constants."""
    text, shapes = "".join(parts), [parse_shape("llama-8b")]
    changed = [written.decode("utf-8", "replace") for written in mutated(MODEL, seed, 5)]
    for model in (text, *changed):
        with contextlib.suppress(UsageError):
            shapes.append(parse_shape(model))
    for device, link in (("h100-80gb", text), (text, "nvlink,400gbit")):
        with contextlib.suppress(UsageError):
            cluster = cluster_of(device, number % 9, link)
            for shape in shapes:
                assert ClusterQuestion(shape, cluster, number, number % 999, number % 65).nodes > 0
    file = tmp_path_factory.getbasetemp() / "constants.yaml"
    for written in mutated(CONSTANTS, seed, 2):
        file.write_bytes(written)
        with contextlib.suppress(UsageError):
            load_constants(file)


SITE = b"account: mine\npartition: gpu\ngpus_per_node: 8\nsetup: [module load python]\n"


@fuzzed(inputs=4, share=2)
@given(content=VALUES, text=TEXT, seed=SEEDS)
def test_a_random_site_file_is_read_or_refused(
    content: Any, text: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "site.yaml"
    for written in (*as_written(yaml.safe_dump(content), text), *mutated(SITE, seed, 2)):
        file.write_bytes(written)
        with contextlib.suppress(UsageError):
            read_site(file)


PLAN = str(one_cell_run()["plan"])


@fuzzed(inputs=10, share=6)
@given(plan=VALUES, text=TEXT, seed=SEEDS)
def test_a_random_plan_is_read_or_refused(plan: Any, text: str, seed: int) -> None:
    whole = json.loads(PLAN)
    changed = whole | plan if isinstance(plan, dict) else plan
    random_ones = (other.decode("utf-8", "replace") for other in mutated(PLAN.encode(), seed, 7))
    for written in (json.dumps(plan), json.dumps(changed), text, *random_ones):
        with contextlib.suppress(UsageError):
            Plan.from_row({"run_id": "run-1", "matrix": "m", "plan": written})


SPEC = TrialSpec(
    Cell(strategy="ddp", devices=2, nodes=2), DataSource("text", "t", "f", None, (), 4), 2
)
MESSAGES = [encoded("run", SPEC), encoded("measure", ("10.0.0.1", 1)), encoded("warm", ["torch"])]


@fuzzed(inputs=34, share=16)
@given(noise=st.binary(max_size=200), value=VALUES, word=WORDS | TEXT, seed=SEEDS)
def test_a_random_message_of_an_agent_is_read_or_refused(
    noise: bytes, value: Any, word: str, seed: int
) -> None:
    bodies = [noise, json.dumps([word, value]).encode(), json.dumps(["run", value]).encode()]
    for good in MESSAGES:
        bodies += mutated(good, seed, 10)
    for body in bodies:
        with contextlib.suppress(ProtocolError):
            decoded(body)
    with contextlib.suppress(ProtocolError):
        decoded(noise + encoded("stop"))


@pytest.fixture(scope="module")
def good_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = Store(tmp_path_factory.mktemp("results"))
    store.write_run(RunRecord(**one_cell_run()))
    return store.folder / "runs" / "run-1.parquet"


@fuzzed(inputs=1, share=2)
@given(
    begin=st.integers(0, 12_000),
    noise=st.binary(min_size=1, max_size=20),
    cut=st.sampled_from([0, 1, 4, 100]),
)
def test_a_random_parquet_file_is_read_or_refused(
    begin: int, noise: bytes, cut: int, good_file: Path
) -> None:
    content = bytearray(good_file.read_bytes())
    content[begin : begin + len(noise)] = noise
    file = good_file.with_name("fuzzed.parquet")
    file.write_bytes(content[: len(content) - cut])
    with contextlib.suppress(DamagedFile, OtherSchema):
        read_file("runs", file)


LOG = b"GET https://me:secret@host?token=abcdefgh Authorization: Bearer x password = 'y' ghp_0123"


@fuzzed(inputs=22, share=12)
@given(text=TEXT, secret=st.text(min_size=8, max_size=20), value=VALUES, seed=SEEDS)
def test_random_text_is_redacted_without_an_error(
    text: str, secret: str, value: Any, seed: int
) -> None:
    """JSON stays JSON, and no secret survives."""
    for log in mutated(LOG, seed, 20):
        shown = redacted(log.decode("utf-8", "replace") + secret, (secret,))
        assert secret in "[redacted]" or secret not in shown
    shown = redacted(json.dumps(value), ())
    json.loads(shown)
    if secret not in "[redacted]" and text not in secret:
        assert secret not in redacted(text + secret + text, (secret,))
