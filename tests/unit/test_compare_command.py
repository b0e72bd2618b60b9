"""Choosing the two sides of a comparison, and the compare command."""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from pathlib import Path

import pytest

from bench.cli.compare import compare
from harness.analysis.selection import find_run, two_sides
from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.record.run_record import RunRecord
from harness.record.store import Store
from harness.record.trial import TrialRecord
from tests import commands
from tests.unit.compared_runs import CELL, NEW, OLD, OTHER
from tests.unit.made_results import run_row, trial_rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three runs: OLD, NEW (slower, one cell missing), and a search after them."""
    store = Store(tmp_path / "results")
    search = json.dumps(
        {"cells": [], "trials": 1, "order_seed": 0, "left_out": [], "search": {"budget": 1}}
    )
    slower = trial_rows(CELL, [90.0, 90.1, 90.2])
    for run_id, rows, plan in (
        (OLD, trial_rows(CELL, [100.0, 100.1, 100.2]) + trial_rows(OTHER, [50.0, 50.1, 50.2]), {}),
        (NEW, slower, {}),
        ("20260103T000000-cccc", trial_rows(CELL, [1.0]), {"plan": search}),
    ):
        store.write_run(RunRecord(**run_row(run_id=run_id, **plan)))
        for row in rows:
            store.write_trial(TrialRecord(**(row | {"run_id": run_id})))
    return store.folder


def test_a_run_is_found_by_what_a_person_types(folder: Path) -> None:
    store = Store(folder)
    assert [
        find_run(store, word) for word in (OLD, "20260101", "latest", "latest~0", "latest~1")
    ] == [OLD, OLD, NEW, NEW, OLD]
    for word in ("2026", "x", "", "latest~2", "latest~x"):
        with pytest.raises(UsageError, match=f"run {word!r}"):
            find_run(store, word)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (OLD, "latest~1", "are the same run"),
        ("RESULTS", "RESULTS", "are the same folder"),
        (OLD, "20260103", "20260103T000000-cccc has no recorded trials to compare"),
        ("EMPTY", OLD, "no runs in results folder"),
        (OLD, "EMPTY", "no runs in results folder"),
    ],
)
def test_sides_that_cannot_be_compared(
    folder: Path, tmp_path: Path, first: str, second: str, said: str
) -> None:
    (tmp_path / "empty").mkdir()
    names = {"RESULTS": str(folder), "EMPTY": str(tmp_path / "empty")}
    with pytest.raises(UsageError, match=said):
        two_sides(names.get(first, first), names.get(second, second), folder)


def test_a_run_against_its_own_folder_is_a_run_against_the_others(folder: Path) -> None:
    was, now = two_sides(str(folder), "latest", folder)
    assert {one.run_id for one in was.cells} == {OLD}
    assert {one.run_id for one in now.cells} == {NEW}
    was, now = two_sides(OLD, str(folder), folder)
    assert [{one.run_id for one in found.cells} for found in (was, now)] == [{OLD}, {NEW}]


def test_the_run_before_the_latest_is_of_the_same_matrix(folder: Path) -> None:
    store = Store(folder)
    for run_id, matrix in (
        ("20260104T000000-dddd", "smoke"),
        ("20260105T000000-eeee", "/a/full.yaml"),
    ):
        started = datetime(2026, 1, int(run_id[7]), tzinfo=timezone.utc)
        row = run_row(run_id=run_id, matrix=matrix, started_at=started)
        store.write_run(RunRecord(**row))
    assert find_run(store, "latest~1") == NEW
    with pytest.raises(UsageError, match="3 runs of matrix 'full'"):
        find_run(store, "latest~3")


def ask(folder: Path, *words: str) -> tuple[int, str]:
    return commands.ask(compare, *words, "--results", str(folder))


def test_json_has_the_numbers(folder: Path) -> None:
    code, told = ask(folder, OLD, NEW, "--json")
    found = json.loads(told)
    assert (code, found["regressions"], found["comparisons"]) == (0, 2, 2)
    assert (found["smallest_effect"], found["false_alarm_rate"]) == (0.005, 0.005)
    slower, missing = found["cells"]
    assert slower["ratio"] == pytest.approx(0.9, rel=1e-3)
    assert slower["ratio_low"] < slower["ratio"] < slower["ratio_high"] < 1
    speeds = (slower["a"]["samples_per_second"], slower["b"]["samples_per_second"])
    assert speeds == pytest.approx((100.1, 90.1), rel=1e-5)
    assert (missing["kind"], missing["b"]) == ("missing", None)
    with pytest.raises(UsageError, match=r"--format md .* --out"):
        ask(folder, OLD, NEW, "--json", "--format", "md")


def test_the_table_counts_disturbed_and_added_cells(tmp_path: Path) -> None:
    store = Store(tmp_path / "noisy")
    busy = {"foreign_load_cores": 0.9, "idle_before": 0.5, "idle_after": 1.0}
    added = trial_rows(Cell(strategy="tensor", devices=2), [50.0])
    for run_id, speeds, load in ((OLD, [100.0, 100.1], {}), (NEW, [90.0, 90.1], busy)):
        store.write_run(RunRecord(**run_row(run_id=run_id)))
        rows = trial_rows(CELL, speeds) + trial_rows(OTHER, [50.0, 50.1])
        for row in rows + added if load else rows:
            store.write_trial(TrialRecord(**(row | load | {"run_id": run_id})))
    text = ask(store.folder, OLD, NEW)[1]
    assert "added: 1 cell of B, not in A\n" in text
    assert "disturbed: trials of 3 cells, 1 of them regressions" in text
    assert "tensor" not in text


def test_exit_codes_tell_scripts_the_outcome(folder: Path) -> None:
    assert ask(folder, "latest~1", "latest", "--fail-on", "regression")[0] == 1
    assert ask(folder, "latest", "latest~1", "--fail-on", "regression")[0] == 0, (
        "faster and added are not regressions"
    )
    assert ask(folder, "20260101", "--fail-on", "regression")[0] == 1
    assert ask(folder, "latest~1", "latest")[0] == 0


def test_a_guard_that_compares_nothing_is_not_green(folder: Path) -> None:
    elsewhere = Store(folder.parent / "elsewhere")
    elsewhere.write_run(RunRecord(**run_row(run_id=NEW, cpu_cores=64)))
    for row in trial_rows(CELL, [100.0, 100.1]) + trial_rows(OTHER, [100.0, 100.1]):
        elsewhere.write_trial(TrialRecord(**(row | {"run_id": NEW})))
    with pytest.raises(UsageError, match="--fail-on"):
        ask(folder, OLD, str(elsewhere.folder), "--fail-on", "regression")
    assert ask(folder, OLD, str(elsewhere.folder))[0] == 0


def test_a_named_baseline_is_a_folder_below_the_results(folder: Path) -> None:
    baseline = Store(folder / "reference" / "release")
    baseline.write_run(RunRecord(**run_row(run_id=OLD)))
    for row in trial_rows(CELL, [45.0, 45.1]):
        baseline.write_trial(TrialRecord(**(row | {"run_id": OLD})))
    found = json.loads(ask(folder, "release", "--json")[1])
    assert found["a"].endswith("reference/release")
    assert found["cells"][0]["ratio"] == pytest.approx(2.0, rel=1e-2)


def test_cells_of_one_run_from_the_command_line(folder: Path) -> None:
    """A label selects the cell with that label, not every cell of that strategy."""
    for row in trial_rows(
        Cell(strategy="ddp", devices=2, options={"static_graph": True}), [1.0, 1.1]
    ):
        Store(folder).write_trial(TrialRecord(**(row | {"run_id": OLD})))
    assert len(json.loads(ask(folder, OLD, "--cells", "ddp*", "fsdp2", "--json")[1])["cells"]) == 2
    code, told = ask(folder, OLD, "--cells", "ddp", "fsdp*", "--json")
    (line,) = json.loads(told)["cells"]
    assert (code, line["kind"]) == (0, "slower")
    assert line["ratio"] == pytest.approx(0.5, rel=1e-3)
    for words, said in (
        ([OLD, "--cells", "dpp", "ddp"], "'dpp'"),
        ([OLD, "--cells", "ddp", "ddp"], "has the same workload"),
        ([OLD, NEW, "--cells", "ddp", "fsdp2"], "two cells of one run"),
        ([], "one or two runs"),
        ([OLD, NEW, OLD], "one or two runs"),
    ):
        with pytest.raises(UsageError, match=re.escape(said)):
            ask(folder, *words)


@pytest.mark.parametrize(
    ("name", "begins"),
    [("page.html", "<!DOCTYPE html>"), ("a.md", "### "), ("a.json", "{"), ("table.txt", "A: ")],
)
def test_a_files_name_tells_its_format(
    folder: Path, tmp_path: Path, name: str, begins: str
) -> None:
    path = tmp_path / name
    assert ask(folder, OLD, NEW, "--out", str(path)) == (0, f"{path}\n")
    text = path.read_text()
    assert text.lstrip().startswith(begins)
    for finding in ("slower", "0.9", "missing", OTHER.name.split()[0]):
        assert finding in text
    assert "\x1b" not in text
    if not name.endswith("json"):
        told = ask(folder, OLD, NEW, "--json", "--out", str(path))[1]
        assert json.loads(told)["regressions"] == 2, "data goes to the terminal, text to the file"
    with pytest.raises(UsageError, match=re.escape(str(tmp_path))):
        ask(folder, OLD, NEW, "--out", str(tmp_path))
