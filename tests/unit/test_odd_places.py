"""Commands under odd circumstances end in one sentence, not in a traceback or in silence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from bench.cli import terminal
from harness.cell.errors import UsageError
from harness.host.user_code import user_class
from harness.nodes.rendezvous import Rendezvous, parse_rendezvous
from harness.record.plan import Plan
from harness.record.store import Store
from harness.workloads import make_workload

ROOT = Path(__file__).parents[2]


def bench(
    *words: str, optimised: str = "", output: str = os.devnull
) -> subprocess.CompletedProcess[str]:
    options = [optimised] if optimised else []
    with open(output, "w") as sink:
        return subprocess.run(
            [sys.executable, *options, "-m", "bench", *words],
            stdout=sink,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            cwd=ROOT,
        )


@pytest.mark.parametrize("words", ["--help", "list strategies", "schema"])
def test_commands_work_without_docstrings(words: str) -> None:
    done = bench(*words.split(), optimised="-OO")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("words", ["--help", "list models", "list models --json"])
def test_a_full_device_is_one_sentence(words: str) -> None:
    done = bench(*words.split(), output="/dev/full")
    assert done.returncode == 2
    assert done.stderr == "bench: the output cannot be written: No space left on device\n"


def test_a_folder_may_be_named_like_markup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store(Path("[/red]"))
    terminal.paths(Console(), store, Plan.new("m", [], 1, []), Path("[red]/page.html"), False)
    shown = capsys.readouterr().out
    assert "parquet: [/red]/" in shown
    assert "[red]/page.html" in shown
    assert "--resume --results [/red]" in shown


@pytest.mark.parametrize("how", ["raise SystemExit", "import sys\nsys.exit()"])
def test_a_users_file_that_exits_is_a_mistake(how: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(how)
    with pytest.raises(UsageError, match="cannot be imported: SystemExit"):
        user_class(f"{tmp_path / 'mine.py'}:Mine")


def test_a_users_class_that_exits_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def __init__(self):\n        raise SystemExit\n"
    )
    with pytest.raises(UsageError, match="cannot be instantiated"):
        make_workload(f"{tmp_path / 'mine.py'}:Mine")


def test_a_deeply_nested_plan_is_a_mistake() -> None:
    plan = f'{{"cells": {"[" * 100_000}{"]" * 100_000}}}'
    with pytest.raises(UsageError, match="cannot be read: RecursionError"):
        Plan.from_row({"run_id": "run-1", "matrix": "m", "plan": plan})
    with pytest.raises(UsageError):
        Plan.from_row({"run_id": "run-1", "matrix": "m", "plan": json.dumps({"cells": [[]]})})


@pytest.mark.parametrize(
    "text", ["[::1]:4000", "::1:4000", "fe80::1%eth0:4000", "[::1]", "2001:db8::2:1"]
)
def test_an_ipv6_rendezvous_is_not_taken_for_a_file(text: str) -> None:
    with pytest.raises(UsageError, match="IPv4"):
        parse_rendezvous(text)


@pytest.mark.parametrize("text", ["meeting", "/tmp/a:b", "./x", "C", "a:b:c/d", "abc"])
def test_a_file_is_still_a_file(text: str) -> None:
    assert parse_rendezvous(text) == Path(text)


def test_a_host_and_port_are_still_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_BENCH_KEY", "ab" * 16)
    assert isinstance(parse_rendezvous("10.0.0.1:4000"), Rendezvous)
