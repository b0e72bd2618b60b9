"""The list of the first ten minutes on a GPU, run here on the CPU with small steps."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from bench import gpu_check as check
from bench.cli.gpu_check import gpu_check
from harness.spec.errors import UsageError

STEP = check.Step(name="a", claim="it runs", limit_seconds=60, words=("run",))


def test_without_a_gpu_it_says_so_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--gpu-check needs a GPU"):
        gpu_check(tmp_path / "out.json", resume=False, budget_seconds=600, steps=None)
    assert not list(tmp_path.iterdir())


def test_the_list_is_one_of_commands_that_there_are() -> None:
    """Each step's words are understood, and its cells are in its matrix on a host with a GPU."""
    import typer.main

    from bench.cli import app

    known: Any = typer.main.get_command(app)
    steps = check.read_steps()
    assert len({step.name for step in steps}) == len(steps)
    for step in steps:
        command = known.commands[step.words[0]]
        command.make_context(step.words[0], [*step.words[1:], "--json"], resilient_parsing=False)


@pytest.mark.parametrize(
    ("cells", "status", "verdict"),
    [
        ([{"status": "ok", "parity_verdict": "exact"}], "ok", "confirmed"),
        ([{"status": "ok", "parity_verdict": None}], "ok", "confirmed"),
        ([{"status": "ok", "parity_verdict": "diverged"}], "ok", "refuted"),
        ([{"status": "failed", "reason": "Cannot re-initialize CUDA"}], "ok", "refuted"),
        ([{"status": "ok"}, {"status": "unavailable", "reason": "no horovod"}], "ok", "confirmed"),
        ([{"status": "unavailable", "reason": "no horovod"}], "ok", "not checked"),
        ([{"status": "out_of_memory"}], "out_of_memory", "confirmed"),
        ([{"status": "failed"}], "out_of_memory", "refuted"),
    ],
)
def test_a_claim_is_confirmed_by_what_its_cells_did(
    cells: list[dict[str, Any]], status: str, verdict: str
) -> None:
    found, reason = check.judge(STEP.model_copy(update={"status": status}), {"cells": cells})
    assert found == verdict
    assert reason


def test_steps_run_go_on_and_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real cell on the CPU, one that fails, one that is out of time: none ends the others, and
    --resume does what is open."""
    facts = check.HostFacts(initialises_cuda={"bad": True, "good": False})
    monkeypatch.setattr(check, "host_facts", lambda: facts)
    small = [
        "--only",
        "single",
        "--trials",
        "1",
        "--set",
        "workload=llama-micro",
        "--set",
        "batch=2",
    ]
    steps = [
        {
            "name": "a cell",
            "words": ["run", "--matrix", "smoke", *small, "--set", "sequence_length=16"],
            "limit_seconds": 120,
        },
        {"name": "a mistake", "words": ["run", "--matrix", "nowhere"], "limit_seconds": 60},
        {"name": "too slow", "words": ["run", "--matrix", "full"], "limit_seconds": 1},
    ]
    listed = tmp_path / "steps.yaml"
    listed.write_text(json.dumps([one | {"claim": "it runs"} for one in steps]))
    file = tmp_path / "out.json"
    with pytest.raises(typer.Exit) as ended:
        gpu_check(file, resume=False, budget_seconds=300, steps=listed)
    assert ended.value.exit_code == 1
    report = check.Report.read(file)
    assert [one.verdict for one in report.outcomes] == ["confirmed", "refuted", "not checked"]
    assert report.outcomes[0].shown["cells"][0]["status"] == "ok"
    assert "nowhere" in report.outcomes[1].reason
    said = capsys.readouterr().out
    assert "importing bad initialises CUDA" in said
    assert "importing good" not in said
    before = report.outcomes[0]
    listed.write_text(listed.read_text().replace('"limit_seconds": 1,', '"limit_seconds": 2,'))
    with pytest.raises(typer.Exit):
        gpu_check(file, resume=True, budget_seconds=0, steps=listed)
    again = check.Report.read(file)
    assert next(one for one in again.outcomes if one.name == "a cell") == before, (
        "what is settled does not run again"
    )
    assert (
        "--resume goes on" in next(one for one in again.outcomes if one.name == "too slow").reason
    )


def test_a_step_past_its_limit_leaves_no_process() -> None:
    """What it started is killed with it."""
    import psutil

    child = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time;"
        " time.sleep(99)']); time.sleep(99)"
    )
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    code, _, _ = check.command([sys.executable, "-c", child], 2.0)
    assert code is None
    left = [
        p
        for p in psutil.process_iter(["cmdline"])
        if p.info["cmdline"] and "time.sleep(99)" in " ".join(p.info["cmdline"])
    ]
    assert not [p for p in left if p.pid not in before]


def test_imports_are_asked_in_processes_of_their_own(tmp_path: Path) -> None:
    assert check.imports_that_initialise(["json", "no_such_module"]) == {
        "json": False,
        "no_such_module": None,
    }
