"""The results store: complete files or none, and one dataset for all readers."""

from __future__ import annotations

import re
import shutil
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from harness.cell.cell import Cell
from harness.cell.errors import DamagedFileWarning, NoRuns, NotRecorded, NotWritable, UsageError
from harness.record.files import TABLES, VERSION, RunFiles, arrow_schema, write_file
from harness.record.run_record import ConclusionRecord, RunRecord
from harness.record.store import Store, TrialKey, check_folder, load
from harness.record.trial import TrialRecord
from tests.unit.stored_trials import one_cell_run, step, trial_row

REFERENCE = Path(__file__).parents[2] / "results" / "reference"


def filled(folder: Path) -> Store:
    store = Store(folder)
    store.write_run(RunRecord(**one_cell_run()))
    for strategy in ("single", "ddp"):
        cell = Cell(strategy=strategy)
        for trial in range(2):
            store.write_trial(
                TrialRecord(**trial_row(cell, trial)),
                [step(TrialKey(cell.id, trial), n) for n in range(3)],
            )
    return store


def leave_only_the_copy(store: Store) -> None:
    store.gather("run-1")
    for table in ("trials", "steps"):
        shutil.rmtree(store.folder / table)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    filled(tmp_path)
    results = load(tmp_path)
    assert (len(results.runs), len(results.trials), len(results.steps)) == (1, 4, 12)
    for table in TABLES:
        assert list(getattr(results, table).columns) == arrow_schema(table).names


def test_pandas_duckdb_and_polars_read_one_dataset(tmp_path: Path) -> None:
    import duckdb
    import pandas as pd
    import polars as pl

    filled(tmp_path).gather("run-1")
    assert len(pd.read_parquet(tmp_path / "trials")) == 4
    assert duckdb.sql(
        f"select sum(step_seconds) from '{tmp_path}/steps/**/*.parquet'"
    ).fetchall() == [(12.0,)]
    assert pl.read_parquet(f"{tmp_path}/trials/**/*.parquet").height == 4


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path)
    before = sorted(p for p in tmp_path.rglob("*") if p.is_file())

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    cell = Cell(strategy="fsdp2")
    with pytest.raises(NotRecorded, match=r"\.parquet' cannot be written: No space"):
        store.write_trial(TrialRecord(**trial_row(cell)), [step(TrialKey(cell.id, 0))])
    assert sorted(p for p in tmp_path.rglob("*") if p.is_file()) == before


def test_a_copy_is_read_only_while_it_is_complete(tmp_path: Path) -> None:
    store = filled(tmp_path)
    before = load(tmp_path)
    store.gather("run-1")
    after = load(tmp_path)
    for table in ("trials", "steps"):
        assert getattr(after, table).equals(getattr(before, table))
    store.write_trial(TrialRecord(**trial_row(Cell(strategy="fsdp2"))))
    assert len(load(tmp_path).trials) == 5
    store.gather("run-1")
    for file in (tmp_path / "trials").rglob("*.parquet"):
        file.write_bytes(b"")  # trials in the copy are not read again
    assert (len(load(tmp_path).trials), len(load(tmp_path).steps)) == (5, 12)


def test_a_resumed_run_with_only_its_copy_loses_nothing(tmp_path: Path) -> None:
    store = filled(tmp_path)
    key = next(iter(store.statuses("run-1")))
    before = load(tmp_path)
    statuses, steps = store.statuses("run-1"), store.steps_of("run-1", key.cell_id)
    leave_only_the_copy(store)
    store.gather("run-1")
    assert load(tmp_path).trials.equals(before.trials)
    assert store.statuses("run-1") == statuses
    assert store.steps_of("run-1", key.cell_id).equals(steps)
    store.write_trial(TrialRecord(**trial_row(Cell(strategy="fsdp2"))))
    store.gather("run-1")
    after = load(tmp_path)
    assert set(after.trials["cell_id"]) == {*before.trials["cell_id"], Cell(strategy="fsdp2").id}
    assert (len(after.trials), len(after.steps)) == (len(before.trials) + 1, len(before.steps))
    assert check_folder(store).problems == ()


def test_a_copy_that_would_lack_a_damaged_trial_is_not_written(tmp_path: Path) -> None:
    """A trial that replaces the damaged one has its name, so the copy would hide it."""
    store = filled(tmp_path)
    key = next(iter(store.statuses("run-1")))
    file = tmp_path / "trials" / "run-1" / f"{key.stem}.parquet"
    intact = file.read_bytes()
    file.write_bytes(intact[:-4])
    store.gather("run-1")
    assert not (tmp_path / "gathered" / "run-1" / "trials.parquet").exists()
    with pytest.warns(DamagedFileWarning, match=key.stem):
        assert len(store.statuses("run-1")) == 3
    file.write_bytes(intact)
    store.gather("run-1")
    assert key in store.statuses("run-1")
    assert not [*tmp_path.rglob("*.tmp")]


def test_interrupted_unpacking_of_a_copy_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path)
    before = load(tmp_path)
    leave_only_the_copy(store)
    new = TrialRecord(**trial_row(Cell(strategy="fsdp2")))
    written: list[Path] = []

    def interrupted(path: Path, *content: Any) -> Path:
        if len(written) == 6:  # all four files of steps and two of four trials
            raise KeyboardInterrupt
        written.append(path)
        return write_file(path, *content)

    with monkeypatch.context() as patched:
        patched.setattr("harness.record.files.write_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.write_trial(new)
    assert len(written) == 6
    assert load(tmp_path).trials.equals(before.trials)
    assert load(tmp_path).steps.equals(before.steps)
    store.write_trial(new)
    assert (len(load(tmp_path).trials), len(load(tmp_path).steps)) == (5, 12)
    assert check_folder(store).problems == ()
    assert not [*tmp_path.rglob("*.tmp")]


def test_a_copy_that_another_process_has_unpacked_is_not_unpacked_again(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.gather("run-1")
    RunFiles(tmp_path).unpack("run-1")
    assert len(load(tmp_path).trials) == 4
    assert not [*tmp_path.rglob("*.tmp")]
    for file in (tmp_path / "trials" / "run-1").iterdir():
        file.rename(file.with_suffix(".other"))
    with pytest.raises(NotRecorded, match=r"trials/run-1' cannot be written: Directory not empty"):
        RunFiles(tmp_path).unpack("run-1")


def test_an_outdated_copy_is_not_read(tmp_path: Path) -> None:
    """The number of files is the same, but one was replaced by another."""
    store = filled(tmp_path)
    store.gather("run-1")
    sorted((tmp_path / "trials" / "run-1").iterdir())[0].unlink()
    new = Cell(strategy="fsdp2")
    store.write_trial(TrialRecord(**trial_row(new)))
    assert TrialKey(new.id, 0) in store.statuses("run-1")


def test_conclusions_at_the_same_moment_are_both_kept(tmp_path: Path) -> None:
    store = filled(tmp_path)
    conclusion = ConclusionRecord(
        schema_version=VERSION,
        run_id="run-1",
        concluded_at=datetime(2026, 1, 2, tzinfo=timezone.utc),
        wall_seconds=1.0,
        trials=4,
        advised_cell_id=None,
        advice=None,
    )
    first = store.write_conclusion(conclusion)
    first.rename(first.with_name("2.parquet"))  # as if written by another process
    store.write_conclusion(conclusion)
    store.write_conclusion(conclusion)
    assert len(load(tmp_path).conclusions) == 3


def test_steps_without_their_trial_do_not_count(tmp_path: Path) -> None:
    """A kill between the two writes leaves only the steps."""
    store = filled(tmp_path)
    cell = Cell(strategy="fsdp2")
    path = store.write_trial(TrialRecord(**trial_row(cell)), [step(TrialKey(cell.id, 0))])
    path.unlink()
    assert len(load(tmp_path).steps) == 12
    assert TrialKey(cell.id, 0) not in store.statuses("run-1")


def test_a_column_that_the_schema_does_not_know_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="thoughput"):
        Store(tmp_path).write_trial(TrialRecord(**trial_row(Cell(strategy="ddp"), thoughput=1.0)))


def test_mistakes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NoRuns, match=re.escape(str(tmp_path))):
        load(tmp_path)
    with pytest.raises(UsageError, match=r"no run 'x'.*run-1"):
        filled(tmp_path).load(["x"])
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(NotWritable, match=re.escape(str(file / "results"))):
        Store(file / "results").require_writable()


def test_records_have_the_types_and_defaults_of_their_columns() -> None:
    results = load(REFERENCE)
    for name, table in TABLES.items():
        records = table.from_frame(getattr(results, name))
        rows = getattr(results, name).to_dict("records")
        assert records == [table.from_row(row) for row in rows]
        for column in table.columns():
            for record in records:
                value = getattr(record, column.name)
                assert value == value or column.is_list
                assert (value is None) <= column.nullable
                assert isinstance(value, tuple) == column.is_list
                assert not column.is_integer or value is None or type(value) is int


def test_what_is_null_in_a_frame_is_the_columns_default_in_a_record() -> None:
    good = {column.name: None for column in TrialRecord.columns()}
    good |= trial_row(Cell(strategy="ddp"), mfu=float("nan"), restarts=float("nan"))
    record = TrialRecord.from_row({**good, "seed": 3.0, "losses": None, "sent_bytes_per_step": ()})
    assert (record.mfu, record.restarts, record.losses) == (None, None, ())
    assert (record.seed, type(record.seed)) == (3, int)
    with pytest.raises(ValueError, match="'strategy' is null or missing"):
        TrialRecord.from_row({**good, "strategy": None})
