"""A record is data: cells of a results folder run no code, and use no hub, unless the user names
it."""

from __future__ import annotations

import inspect
import json
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

import bench
from bench.cli import COMMANDS, app
from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.record.plan import require_named
from harness.workloads import catalog, training_data
from tests.commands import ask
from tests.unit.made_results import stored, trial_rows

RUN, OTHER = "20260101T000000-abcd", "20260101T000000-0000"
WORDS = {
    "run": ["--resume", "--dry-run"],
    "run --run": ["--run", RUN, "--dry-run"],
    "report": [RUN, "--out", "page.html"],
    "show": ["CELL"],
    "compare": [OTHER, RUN],
    "profile": ["CELL", "--out", "traces"],
    "maxsize": ["--resume", "--no-report"],
    "check": ["RESULTS"],
    "fits": ["llama-8b", "--gpus", "1 x h100"],
    "plan": ["--model", "llama-8b", "--gpus", "2 x h100"],
    "export": ["CELL", "--to", "torchrun", "--out", "exported"],
    "publish": ["mlflow", "published", RUN],
    "site": ["RESULTS", "--out", "collected"],
    "submit": ["SITE", "--matrix", "smoke", "--dry-run"],
    "status": [RUN],
    "night": ["smoke"],
    "prune": ["--keep", "9"],
}
"""Arguments by command; a command may occur twice, with a word after its name."""
WITHOUT_RESULTS = {"bisect", "list", "schema", "doctor", "rehearse"}
"""Commands that read no results folder."""
EVIL = "from pathlib import Path\nPath('MARK').touch()\n"
HUB = "hf:stranger/model"
SITE = sorted((Path(__file__).parents[2] / "slurm" / "sites").glob("*.yaml"))[0]


def test_every_command_that_reads_results_is_tried() -> None:
    functions = {
        name: getattr(import_module(f"bench.cli.{path.partition(':')[0]}"), path.partition(":")[2])
        for panel in COMMANDS.values()
        for name, path in panel.items()
    }
    reading = {
        name
        for name, run in functions.items()
        if {"results", "path", "folders"} & set(inspect.signature(run).parameters)
    }
    assert reading <= {words.partition(" ")[0] for words in WORDS}
    assert functions.keys() - WITHOUT_RESULTS == {words.partition(" ")[0] for words in WORDS}


def hostile_cells(evil: Path) -> dict[str, Cell]:
    code = f"{evil}:Evil"
    return {
        "workload": Cell(strategy="ddp", devices=2, workload=code),
        "suffixed workload": Cell(strategy="ddp", devices=2, workload=f"{code}+lora"),
        "strategy": Cell(strategy=code, devices=2),
        "checkpoint": Cell(strategy="ddp", devices=2, checkpoint_from=f"{code} x2"),
        "module": Cell(strategy="ddp", devices=2, workload=f"{evil.stem}:Evil"),
        "hub": Cell(strategy="ddp", devices=2, workload=HUB),
        "hub data": Cell(strategy="ddp", devices=2, data=HUB),
    }


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that leaves a mark if it runs. Asking a hub fails the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for module, name in ((catalog, "read_config"), (training_data, "_hub_rows")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("a hub was asked"))
    file = tmp_path / "stranger.py"
    file.write_text(EVIL.replace("MARK", str(tmp_path / "mark")))
    return file


@pytest.mark.parametrize("how", hostile_cells(Path("x.py")))
@pytest.mark.parametrize("words", WORDS)
def test_a_strangers_folder_runs_no_code(how: str, words: str, evil: Path) -> None:
    cell = hostile_cells(evil)[how]
    search = {"search": {"budget_bytes": 2**30}} if words == "maxsize" else {}
    plan = {"cells": [cell.model_dump(mode="json")], "trials": 3, "order_seed": 7}
    plan |= {"left_out": [], "once": []} | search
    matrix = "maxsize" if words == "maxsize" else "full"
    stored(Path("results"), trial_rows(cell, [10.0, 11.0]), matrix=matrix, plan=json.dumps(plan))
    stored(Path("results"), [], run_id=OTHER, matrix=matrix, plan=json.dumps(plan))
    places = {"CELL": cell.id, "RESULTS": "results", "SITE": str(SITE)}
    command = words.partition(" ")[0]
    given = [places.get(word, word) for word in WORDS[words]]
    if "RESULTS" not in WORDS[words]:
        given += ["--results", "results"]
    done = CliRunner().invoke(app, [command, *given])
    assert "Usage:" not in done.output, done.output
    assert not Path("mark").exists()


@pytest.mark.parametrize("how", hostile_cells(Path("x.py")))
def test_one_sentence_says_what_to_name(how: str, evil: Path) -> None:
    cell = hostile_cells(evil)[how]
    with pytest.raises(UsageError, match="results name"):
        require_named([cell], [])
    require_named([cell], [json.dumps(cell.model_dump(mode="json"))])


def test_a_file_is_named_in_any_usual_way(evil: Path) -> None:
    cell = hostile_cells(evil)["workload"]
    for given in ("stranger.py", f"workload={evil}:Evil", "cells:\n- {workload: stranger.py:Evil}"):
        require_named([cell], ["smoke", given])
    with pytest.raises(UsageError):
        require_named([cell], ["other.py", "stranger"])


def test_check_lists_code_and_hubs(evil: Path) -> None:
    from bench.cli.check import check

    cells = list(hostile_cells(evil).values())
    rows = [row for cell in cells for row in trial_rows(cell, [10.0])]
    plan = {"cells": [cell.model_dump(mode="json") for cell in cells], "trials": 1}
    stored(Path("results"), rows, plan=json.dumps(plan))
    _, shown = ask(check, "results", "--json")
    assert json.loads(shown)["foreign_names"] == sorted(
        [f"{evil}:Evil", f"{evil}:Evil x2", f"{evil}:Evil+lora", "stranger:Evil", HUB]
    )
    assert f"cells name {HUB}" in ask(check, "results")[1]


def test_python_continues_a_run_only_with_code_that_it_names(evil: Path) -> None:
    cell = hostile_cells(evil)["workload"]
    plan = {"cells": [cell.model_dump(mode="json")], "trials": 1}
    stored(Path("results"), trial_rows(cell, [10.0]), plan=json.dumps(plan))
    with pytest.raises(UsageError, match="results name"):
        bench.run(run_id=RUN, matrix="full")
