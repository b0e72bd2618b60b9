"""Runs and cells that command-line arguments select."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest

import bench
from bench.select import (
    RecordedCell,
    closest,
    find_cells,
    find_run,
    find_runs,
    find_sides,
    keep,
    matching,
    plainest,
    split_options,
    with_options,
)
from harness.analysis.selection import measured, spread_between_runs
from harness.cell.cell import Cell
from harness.cell.errors import DamagedFileWarning, NoRuns, UsageError
from harness.record.plan import Plan, resumable
from harness.record.run_record import RunRecord
from harness.record.store import Store
from harness.record.trial import TrialRecord
from tests.unit.made_results import rows_of, run_row, trial_rows

PLAIN = Cell(strategy="ddp", devices=2)
STATIC = Cell(strategy="ddp", devices=2, options={"static_graph": True})
SHARDED = Cell(strategy="fsdp2", devices=2)
CELLS = [STATIC, PLAIN, SHARDED]
NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
RECORDED = [RecordedCell(cell.id, cell) for cell in CELLS]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    kept = Store(tmp_path)
    for run_id, cell in (("20260101T000000-aaaa", PLAIN), ("20260102T000000-bbbb", SHARDED)):
        plan = Plan(run_id, "m", (cell,), 1)
        kept.write_run(RunRecord(**run_row(run_id=run_id, plan=plan.to_json())))
    return kept


def test_runs_are_found_by_id_prefix_or_latest(store: Store, tmp_path: Path) -> None:
    old, new = store.run_ids()
    assert find_runs(store, []) == [new]
    assert find_runs(store, [], every=True) == [old, new]
    assert find_runs(store, ["latest", "20260101", "latest~1"]) == [old, new]
    with pytest.raises(UsageError, match="--all"):
        find_runs(store, ["latest"], every=True)
    with pytest.raises(UsageError, match="'2026'"):
        find_runs(store, ["2026"])
    with pytest.raises(NoRuns, match="empty"):
        find_runs(Store(tmp_path / "empty"), [])


def test_a_comparison_is_of_two(tmp_path: Path) -> None:
    for names in ([], ["latest", "latest~1", "release"]):
        with pytest.raises(UsageError, match="one or two runs or folders"):
            find_sides(names, tmp_path)


def test_an_exact_name_comes_before_a_pattern() -> None:
    assert [row.cell.label for row in closest(RECORDED, "ddp")] == ["ddp"]
    assert [row.cell.label for row in matching(RECORDED, "ddp")] == [STATIC.label, "ddp"]
    for word in (STATIC.id, STATIC.name, STATIC.label):
        assert [cell.cell_id for cell in closest(RECORDED, word)] == [STATIC.id]
    assert [row.cell.label for row in closest(RECORDED, "*x2*")] == [cell.label for cell in CELLS]
    assert closest(RECORDED, "dpp") == []


def test_cells_are_found_in_a_matrix_or_else_in_a_run(store: Store) -> None:
    assert find_cells(CELLS, "ddp", "m", store) == [STATIC, PLAIN]
    assert find_cells([STATIC], SHARDED.id, "m", store) == [SHARDED]
    assert find_cells([STATIC], SHARDED.name, "m", store) == [SHARDED]
    assert find_cells(CELLS, "ddp", "m", store, ["batch=4"]) == [STATIC, PLAIN]
    with pytest.raises(UsageError, match="--set 'batch=4'"):
        find_cells([STATIC], SHARDED.id, "m", store, ["batch=4"])
    with pytest.raises(UsageError, match=r"'dpp' .* the matrix has: ddp, fsdp2"):
        find_cells(CELLS, "dpp", "m", store)
    assert plainest([STATIC, PLAIN]) == PLAIN
    assert with_options(PLAIN, "static_graph=true") == STATIC


@pytest.mark.parametrize(
    ("word", "name", "options"),
    [
        ("ddp", "ddp", None),
        ("ddp:a=x:y,b=2", "ddp", "a=x:y,b=2"),
        ("ddp:fast", "ddp", "fast"),
        ("my.py:Mine", "my.py:Mine", None),
        ("my.py:Mine:a=1", "my.py:Mine", "a=1"),
        ("ddp my.py:Net x2*", "ddp my.py:Net x2*", None),
        ("my.py:Mine(a=1) *", "my.py:Mine(a=1) *", None),
    ],
)
def test_options_after_a_name_are_split_off(word: str, name: str, options: str | None) -> None:
    assert split_options(word) == (name, options)


def test_only_and_skip_choose_cells() -> None:
    assert keep(CELLS, ["ddp"], [STATIC.id]) == [PLAIN]
    assert keep(CELLS, [], ["ddp*"]) == [SHARDED]
    for only, skip, message in (
        (["dpp"], [], "--only 'dpp' matches no cell of the matrix.*: ddp, fsdp2"),
        (["ddp"], ["ddp"], "--only and --skip leave no cell"),
        ([], ["*"], "^--skip leaves no cell"),
    ):
        with pytest.raises(UsageError, match=message):
            keep(CELLS, only, skip)


def test_runs_are_in_order_of_time_whatever_their_names(store: Store) -> None:
    cells = {"before": 3, "after": 4, "20260105T000000-cccc": 5, "first": 1}
    for run_id, day in cells.items():
        started = datetime(2026, 1, day, 12, tzinfo=timezone.utc)
        store.write_run(RunRecord(**run_row(run_id=run_id, started_at=started)))
        rows = trial_rows(PLAIN, [100.0 + day])
        store.write_trial(TrialRecord(**(rows[0] | {"run_id": run_id})))
    store.write_run(RunRecord(**run_row(run_id="also-first", started_at=NOON)))
    in_order = ["20260101T000000-aaaa", "also-first", "first", "20260102T000000-bbbb"]
    in_order += ["before", "after", "20260105T000000-cccc"]
    assert store.run_ids() == in_order
    assert [row["run_id"] for row in store.newest_rows()] == in_order[::-1]
    assert find_runs(store, ["after", "before"]) == ["before", "after"]
    assert find_runs(store, ["latest~1", "latest~2"]) == ["before", "after"]
    assert resumable(store, None).run_id == in_order[-1]
    loaded = bench.load(store.folder, ["after", "before"])
    assert list(loaded.runs["run_id"]) == ["before", "after"]
    ran = [cell.run_id for cell in measured(store.load())]
    assert ran == ["first", "before", "after", "20260105T000000-cccc"]


def test_a_named_run_with_a_damaged_file_is_not_the_newest(store: Store) -> None:
    store.write_run(RunRecord(**run_row(run_id="1st", started_at=NOON)))
    file = store.folder / "runs" / "1st.parquet"
    file.write_bytes(file.read_bytes()[:200] + b"PAR1")
    with pytest.warns(DamagedFileWarning, match="1st"):
        assert find_run(store, "latest") == "20260102T000000-bbbb"


def test_the_spread_between_runs_covers_every_run_that_has_both_cells(tmp_path: Path) -> None:
    store = Store(tmp_path)
    kept = {"a": (11.0, "Xeon"), "b": (10.5, "Xeon"), "c": (9.0, "EPYC"), "d": (None, "other")}
    for run_id, (rate, model) in kept.items():
        store.write_run(RunRecord(**run_row(run_id=run_id, cpu_model=model)))
        rows = trial_rows(SHARDED, [rate], run_id=run_id) if rate else []
        for row in [*rows, *trial_rows(PLAIN, [10.0], run_id=run_id)]:
            store.write_trial(TrialRecord(**row))
    both = rows_of(store.load(["a"]))
    sharded, plain = (both[f"{cell.label} {cell.workload}"] for cell in (SHARDED, PLAIN))
    assert spread_between_runs(sharded, plain, store.load()) == (
        "in 3 runs on 2 processors, fsdp2 was −10.0 to 10.0% faster than ddp"
    )
    assert not spread_between_runs(sharded, plain, store.load(["a", "d"]))
