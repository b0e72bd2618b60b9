"""The command line: its output, its exit codes, and mistakes that write nothing."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

from bench.cli import COMMANDS, app, main
from harness.record.run_record import ConclusionRecord
from harness.record.store import load
from harness.workloads.workload import AUTO

ROOT = Path(__file__).parents[2]
REFERENCE = str(ROOT / "results" / "reference")
RUN = "20261128T064652-090b"


def here(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs a command in this process, whose imports are already done."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["bench", *words]),
    ):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def bench(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs a command in a new process."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.run(
        [sys.executable, "-m", "bench", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run"], ["--matrix"]),
        (["run", "--matrix", "fulll"], ["'fulll'", "full"]),
        (["run", "--matrix", "smoke", "--only", "dpp"], ["--only 'dpp'", "ddp"]),
        (["run", "--matrix", "smoke", "--set", "batch"], ["--set 'batch'", "axis=value"]),
        (["run", "--matrix", "smoke", "--set", "bacth=3"], ["'bacth'", "'batch'"]),
        (["run", "--matrix", "smoke", "--set", "workload=gpt9"], ["'gpt9'"]),
        (["run", "--matrix", "smoke", "--set", "data=text:nowhere.txt"], ["'nowhere.txt'"]),
        (["run", "--matrix", "smoke", "--set", "options={colour: red}"], ["'colour'"]),
        (["run", "--matrix", "smoke", "--resume", "--trials", "3"], ["--resume", "--trials"]),
        (
            ["run", "--matrix", "smoke", "--resume", "--time-budget", "5min"],
            ["--resume", "--time-budget"],
        ),
        (
            ["run", "--matrix", "smoke", "--share", "0/2", "--time-budget", "5min"],
            ["--share", "--time-budget"],
        ),
        (["run", "--resume"], ["nothing to resume"]),
        (["run", "--matrix", "smoke", "--host", "8 x h100-80gb"], ["--host", "--dry-run"]),
        (
            ["run", "--matrix", "smoke", "--dry-run", "--host", "8 x abacus"],
            ["'abacus'", "h100-80gb", "rtx-4090"],
        ),
        (["run", "--matrix", "smoke", "--run", "index"], ["'index'", "another name"]),
        (["run", "--matrix", "typo.yaml"], ["typo.yaml, cells[0]", "'stratgy'", "'strategy'"]),
        (
            ["run", "--matrix", "smoke", "--results", "file/results"],
            ["'file/results'"],
        ),
        (["report", "--results", "nowhere"], ["nowhere"]),
        (
            ["report", "--section", "verdit", "--results", REFERENCE],
            ["'verdit'", "verdict"],
        ),
        (["report", "--format", "pdf", "--results", REFERENCE], ["--format", "pdf-ready"]),
        (
            ["report", "--index", "--baseline-cell", "ddp", "--results", REFERENCE],
            ["--index"],
        ),
        (["run", "--matrix", "smoke", "--trials", "0"], ["--trials"]),
        (["compare"], ["--baseline", "latest~1 latest"]),
        (["compare", "latest~1", "latest"], ["results"]),
        (["compare", RUN, "run-2", "--results", REFERENCE], ["'run-2'", RUN]),
        (["compare", RUN, "latest", "--results", REFERENCE], [RUN]),
        (["compare", RUN, "empty", "--results", REFERENCE], ["'empty'"]),
        (
            ["compare", RUN, "--cells", "dpp", "ddp", "--results", REFERENCE],
            ["'dpp'", "ddp"],
        ),
        (["compare", "latest~1", "latest", "--fail-on", "slowness"], ["--fail-on", "regression"]),
        (["compare", "--history"], ["results"]),
        (["compare", "--history", "--fail-on", "regression"], ["--history", "--figure"]),
        (["check", "nowhere"], ["nowhere"]),
        (["site", "nowhere"], ["nowhere"]),
        (["site", "empty"], ["no runs", "empty"]),
        (["check", "empty"], ["empty", "runs/"]),
        (["check", "file", "--repair"], ["--repair", "folder"]),
        (["show", "ddp"], ["results"]),
        (["show", "dpp", "--results", REFERENCE], ["'dpp'", "ddp"]),
        (["doctor", "--gpu-check"], ["--gpu-check"]),
        (["publish", "comet", "folder"], ["comet", "tensorboard"]),
        (
            ["publish", "prometheus", "folder", "nope", "--results", REFERENCE],
            ["'nope'", RUN],
        ),
        (["compare", "--history", "dpp", "--results", REFERENCE], ["'dpp'", "ddp"]),
        (["profile", "dpp"], ["'dpp'", "ddp"]),
        (["profile", "ddp:speed=3"], ["'speed'", "bucket_cap_mb"]),
        (["profile", "nowhere.py:Mine"], ["'nowhere.py:Mine'"]),
        (["rehearse", "dpp"], ["'dpp'", "ddp"]),
        (["rehearse", "nowhere.py:Mine"], ["nowhere.py", "cannot be imported"]),
        (["rehearse", "ddp:speed=3"], ["'speed'", "bucket_cap_mb"]),
        (["rehearse", "ddp", "--workload", "gpt9"], ["'gpt9'"]),
        (["rehearse", "ddp", "--devices", "0"], ["devices"]),
        (["rehearse", "ddp", "--devices", "3"], ["multiple of 3"]),
        (["rehearse", "ddp", "--rank", "2"], ["rank 2", "0 to 1"]),
        (["list", "colours"], ["colours"]),
        (["fly"], ["fly"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_sentence_exit_code_2_and_nothing_written(
    tmp_path: Path, words: list[str], said: list[str]
) -> None:
    (tmp_path / "typo.yaml").write_text("cells: [{stratgy: ddp}]")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    done = here(*words, folder=tmp_path)
    assert done.returncode == 2, done.stderr
    for word in said:
        assert word in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_mistake_is_told_without_a_traceback(tmp_path: Path) -> None:
    done = bench("run", "--matrix", "fulll", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("bench: ")
    assert "'fulll'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_batch_that_does_not_divide_is_refused_in_the_plan(tmp_path: Path) -> None:
    done = here(
        "run", "--matrix", "smoke", "--set", "batch=3", "--dry-run", "--json", folder=tmp_path
    )
    assert done.returncode == 0
    plan = json.loads(done.stdout)
    refused = {x["cell"]["strategy"]: x["reason"] for x in plan["left_out"]}
    assert "global batch 3 does not divide into 2 data-parallel ranks" in refused["ddp"]
    assert "use a multiple of 2" in refused["ddp"]
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_plans_for_another_host(tmp_path: Path) -> None:
    done = here(
        "run",
        "--matrix",
        "smoke",
        "--dry-run",
        "--host",
        "8 x h100-80gb",
        "--json",
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert {cell["device"] for cell in plan["cells"]} == {"cuda"}
    assert max(cell["devices"] for cell in plan["cells"]) == 8
    assert all(seconds > 0 for seconds in plan["expected_seconds"].values())
    assert plan["references"]["kept_bytes"] > 0


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    done = here("run", "--matrix", "smoke", "--dry-run", folder=tmp_path)
    assert done.returncode == 0
    assert "trials" in done.stdout
    assert list(tmp_path.iterdir()) == []
    assert "\x1b" not in done.stdout, "colour only on a terminal"


@pytest.mark.parametrize("what", ["strategies", "workloads", "matrices"])
def test_list(what: str) -> None:
    rows = json.loads(here("list", what, "--json").stdout)
    names = {row["name"] for row in rows}
    assert {"strategies": "fsdp2", "workloads": "gpt2-xl", "matrices": "full"}[what] in names
    assert here("list", what).returncode == 0


def test_the_list_has_all_kinds_of_pretrained_models() -> None:
    rows = json.loads(here("list", "workloads", "--json").stdout)
    kinds = {row["name"]: row["kind"] for row in rows}
    assert set(kinds["hf:PATH_OR_ID"].split(", ")) == set(AUTO)


def test_doctor_says_what_each_strategy_lacks() -> None:
    found = json.loads(here("doctor", "--json").stdout)
    assert {"devices", "libraries", "compiled_ops", "links", "strategies"} <= set(found)
    assert found["strategies"]["ddp"] == "ready"
    for package, part in (
        ("horovod", "Horovod's controller gloo"),
        ("deepspeed", "DeepSpeed's cpu_adam"),
    ):
        if find_spec(package):
            state = found["compiled_ops"][part]
            assert state == "built" or "make setup" in state
    assert (
        "stand-in" in found["strategies"]["data_parallel"]
        or found["devices"]["used by cells"] == "cuda"
    )
    assert here("doctor").returncode == 0


@pytest.mark.parametrize("command", [name for panel in COMMANDS.values() for name in panel])
def test_every_command_has_an_example_in_its_help_and_is_in_the_readme(command: str) -> None:
    shown = CliRunner().invoke(app, [*command.split(), "--help"]).stdout
    assert f"Example: python -m bench {command} " in " ".join(shown.split())
    assert f"python -m bench {command}" in (ROOT / "README.md").read_text()


def test_help_breaks_lines_only_at_the_width_of_the_terminal() -> None:
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["report", "--help"]).stdout
    assert "pages go to reports/html/, text and data to the terminal." in shown


def test_help_imports_nothing_heavy() -> None:
    heavy = {"torch", "pandas", "numpy", "matplotlib", "transformers"}
    code = (
        f"import sys; import bench.cli; bad = {heavy} & set(sys.modules); sys.exit(str(bad) if bad"
        " else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_run_ends_with_ranking_paths_and_report(tmp_path: Path) -> None:
    options = [
        "--matrix",
        "smoke",
        "--only",
        "single",
        "--only",
        "ddp",
        "--set",
        "workload=llama-nano",
        "--set",
        "timed_steps=3",
        "--trials",
        "1",
        "--timed-seconds",
        "0.1",
    ]
    done = bench("run", *options, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "throughput" in done.stdout
    assert "exact" in done.stdout
    [conclusion] = ConclusionRecord.from_frame(load(tmp_path / "results").conclusions)
    assert (conclusion.trials, conclusion.wall_seconds > 0) == (3, True)
    assert conclusion.advice is None, "one trial of each cell compares nothing"
    page = next((tmp_path / "reports" / "html").glob("*.html"))
    assert page.name in done.stdout
    again = here("report", "--json", "--out", str(tmp_path / "again.html"), folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again.html").exists()
