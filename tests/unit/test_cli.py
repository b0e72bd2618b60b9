"""The command line: its output, its exit codes, and mistakes that write nothing."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from bench.cli import COMMANDS, app, main
from bench.cli.run_progress import show_summary
from bench.execution import prepare
from bench.run_options import CommandOptions
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


MISTAKES = {
    "run": "--matrix",
    "run --matrix fulll": "full",
    "run --matrix smoke --only dpp": "ddp",
    "run --matrix smoke --set batch": "axis=value",
    "run --matrix smoke --set bacth=3": "'batch'",
    "run --matrix smoke --set workload=gpt9": "'gpt9'",
    "run --matrix smoke --set data=text:nowhere.txt": "'nowhere.txt'",
    "run --matrix smoke --set options={colour:red}": "colour",
    "run --matrix smoke --resume --time-budget 5min": "--time-budget",
    "run --matrix smoke --share 0/2 --time-budget 5min": "--share",
    "run --resume": "nothing to resume",
    "run --matrix smoke --host 8xh100-80gb": "--dry-run",
    "run --matrix smoke --dry-run --host 8xabacus": "h100-80gb",
    "run --matrix smoke --run index": "another name",
    "run --matrix typo.yaml": "'strategy'",
    "run --matrix smoke --results file/results": "'file/results'",
    "run --matrix smoke --trials 0": "--trials",
    "report --results nowhere": "nowhere",
    "report --format pdf": "pdf-ready",
    "compare latest~1 latest": "results",
    "compare latest~1 latest --fail-on slowness": "regression",
    f"compare {RUN} run-2 --results {REFERENCE}": RUN,
    f"compare {RUN} empty --results {REFERENCE}": "'empty'",
    f"compare --history dpp --results {REFERENCE}": "ddp",
    "check nowhere": "nowhere",
    "check empty": "runs/",
    "check file --repair": "folder",
    "site nowhere": "nowhere",
    "site empty": "no runs",
    f"show dpp --results {REFERENCE}": "ddp",
    "doctor --gpu-check": "--gpu-check",
    "publish comet folder": "mlflow",
    f"publish prometheus folder nope --results {REFERENCE}": RUN,
    "profile dpp": "ddp",
    "profile ddp:speed=3": "bucket_cap_mb",
    "rehearse nowhere.py:Mine": "cannot be imported",
    "rehearse ddp --devices 3": "multiple of 3",
    "rehearse ddp --rank 2": "0 to 1",
    "list colours": "colours",
    "fly": "fly",
}
"""Mistaken commands, with the word that helps."""


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_sentence_exit_code_2_and_nothing_written(
    tmp_path: Path, words: str
) -> None:
    (tmp_path / "typo.yaml").write_text("cells: [{stratgy: ddp}]")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    done = here(*words.split(), folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert MISTAKES[words] in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_mistake_is_told_without_a_traceback(tmp_path: Path) -> None:
    done = bench("run", "--matrix", "fulll", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("bench: ")
    assert "'fulll'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dry_run_plans_for_another_host_and_writes_nothing(tmp_path: Path) -> None:
    words = ["run", "--matrix", "smoke", "--dry-run"]
    done = here(*words, "--host", "8 x h100-80gb", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert {cell["device"] for cell in plan["cells"]} == {"cuda"}
    assert max(cell["devices"] for cell in plan["cells"]) == 8
    assert all(seconds > 0 for seconds in plan["expected_seconds"].values())
    assert plan["references"]["kept_bytes"] > 0
    assert plan["predicted_from"]
    done = here(*words, "--set", "batch=3", folder=tmp_path)
    assert "global batch 3 does not divide into 2 data-parallel ranks" in done.stdout
    assert "\x1b" not in done.stdout, "colour only on a terminal"
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_summed_up_in_five_lines() -> None:
    """The table of cells and the reasons of those left out are the dry run's alone."""
    out = Console(file=io.StringIO(), width=200)
    prepared = prepare(CommandOptions(matrix="smoke", settings=["batch=3"], dry_run=True))
    show_summary(out, prepared, is_dry=False)
    assert isinstance(out.file, io.StringIO)
    title, trials, references, total, left_out = out.file.getvalue().splitlines()
    assert title.startswith("matrix smoke: ")
    assert trials.startswith(f"{prepared.trials_to_run} trials to run, about ")
    assert "if none are cached" in references
    assert total.endswith(" in total")
    count = len(prepared.plan.left_out)
    assert left_out == f"left out: {count} cells ({count} refused); --dry-run shows the reasons"


def test_the_list_has_all_kinds_of_pretrained_models() -> None:
    rows = {row["name"]: row for row in json.loads(here("list", "workloads", "--json").stdout)}
    assert set(rows["hf:PATH_OR_ID"]["kind"].split(", ")) == set(AUTO)
    assert rows["resnet-50"]["parameters"] == 25_557_032
    assert rows["resnet-50"]["vocabulary"] is None
    models = {
        row["name"]: row["parameters"]
        for row in json.loads(here("list", "models", "--json").stdout)
    }
    assert models["llama-7b"] == rows["llama-7b"]["parameters"]
    assert here("plan", "--model", "?").stderr.strip().endswith("python -m bench list models")


def test_doctor_says_what_each_strategy_lacks() -> None:
    found = json.loads(here("doctor", "--json").stdout)
    assert {"devices", "libraries", "compiled_ops", "links", "strategies"} <= set(found)
    assert {found["strategies"][name] for name in ("ddp", "three_d", "deepspeed_auto")} == {"ready"}
    assert not [text for text in found["strategies"].values() if "resnet" in text]
    for part in ("Horovod's controller gloo", "DeepSpeed's cpu_adam"):
        state = found["compiled_ops"].get(part, "built")
        assert state == "built" or "make setup" in state
    on_gpus = found["devices"]["used by cells"] == "cuda"
    assert on_gpus or "stand-in" in found["strategies"]["data_parallel"]


@pytest.mark.parametrize("command", [name for panel in COMMANDS.values() for name in panel])
def test_every_command_has_an_example_in_its_help(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"]).stdout
    assert f"Example: python -m bench {command} " in " ".join(shown.split())


def test_help_names_no_option_that_its_command_lacks() -> None:
    commands, lacking = typer.main.get_command(app).commands, {}  # type: ignore[attr-defined]
    for name, command in commands.items():
        texts = [command.help or "", *(getattr(p, "help", "") or "" for p in command.params)]
        named = re.findall(r"(?<![\w-])--[a-z][a-z-]*", " ".join(texts))
        options = {option for p in command.params for option in (*p.opts, *p.secondary_opts)}
        if wrong := set(named) - options:
            lacking[name] = wrong
    assert lacking == {}


def test_help_imports_nothing_heavy() -> None:
    heavy = {"torch", "pandas", "numpy", "matplotlib", "transformers"}
    code = (
        f"import sys; import bench.cli; bad = {heavy} & set(sys.modules); sys.exit(str(bad) if bad"
        " else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_folder_called_reports_hides_no_package(tmp_path: Path) -> None:
    """Each run writes one into the working directory."""
    (tmp_path / "reports").mkdir()
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "bench", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=inherited, capture_output=True, text=True)
    if "No module named bench" in done.stderr:
        pytest.skip("the project is not installed in this environment")
    assert done.returncode == 0, done.stderr
