"""Damaged files: found, left out by readers with a warning, moved away; none is read as if it were
whole."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bench.cli.doctor import doctor
from harness.record.files import DamagedFile, OtherSchema, read_file
from harness.record.integrity import check_folder, quarantine
from harness.record.run_record import RunRecord
from harness.record.schema import VERSION, VERSION_KEY
from harness.record.store import Store, TrialKey
from harness.record.trial import TrialRecord
from harness.spec.cell import Cell
from harness.spec.errors import DamagedFileWarning, DamagedRun, NoRuns
from tests.commands import ask
from tests.unit.stored_trials import one_cell_run, step, trial_row

CELL = Cell(strategy="single")
KEYS = [TrialKey(CELL.id, trial) for trial in range(3)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two runs; the newer one has three trials with a step each."""
    made = Store(tmp_path / "results")
    for run_id in ("run-0", "run-1"):
        made.write_run(RunRecord(**one_cell_run(run_id)))
    for key in KEYS:
        made.write_trial(TrialRecord(**trial_row(CELL, key.trial)), [step(key)])
    return made


def trial_file(store: Store, trial: int) -> Path:
    return store.folder / "trials" / "run-1" / f"{KEYS[trial].stem}.parquet"


def flip(file: Path, place: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << bit
    file.write_bytes(content)


def test_a_good_folder_has_no_problem(store: Store) -> None:
    store.gather("run-1")
    checked = check_folder(store)
    assert (checked.files, checked.problems) == (10, ())


def test_the_reference_run_is_good() -> None:
    folder = Path(__file__).parents[2] / "results" / "reference"
    assert check_folder(Store(folder)).problems == ()


def test_flipped_bits_are_found_wherever_they_are(store: Store) -> None:
    """Of one file; where the flip is not found, the rows are what they were."""
    file = trial_file(store, 0)
    whole, rows = file.read_bytes(), read_file("trials", file)
    chance, found = random.Random(7), 0
    for _ in range(250):
        flip(file, chance.randrange(len(whole)), chance.randrange(8))
        try:
            assert read_file("trials", file).equals(rows)
        except (DamagedFile, OtherSchema):
            found += 1
        file.write_bytes(whole)
    assert found > 125


@pytest.mark.parametrize("size", [0, 3, 7, 100, -1, -9])
def test_a_truncated_file_is_left_out_with_a_warning(store: Store, size: int) -> None:
    file = trial_file(store, 1)
    file.write_bytes(file.read_bytes()[:size])
    with pytest.warns(DamagedFileWarning, match=file.name):
        assert sorted(store.load().trials["trial"]) == [0, 2]
    with pytest.warns(DamagedFileWarning):
        assert set(store.statuses("run-1")) == {KEYS[0], KEYS[2]}


def test_a_file_of_another_tool_or_another_trial_is_a_problem(store: Store) -> None:
    pq.write_table(pa.table({"a": [1]}), trial_file(store, 0))
    trial_file(store, 1).write_bytes(trial_file(store, 2).read_bytes())
    (store.folder / "trials" / "run-1" / "notes.parquet").write_text("hello")
    problems = {str(p.file.name): p.what for p in check_folder(store).problems}
    assert "table trials" in problems[trial_file(store, 0).name]
    assert "another trial" in problems[trial_file(store, 1).name]
    assert len(problems) == 3


def test_a_damaged_copy_is_not_read_while_the_files_are_there(store: Store) -> None:
    store.gather("run-1")
    copy = store.folder / "gathered" / "run-1" / "trials.parquet"
    flip(copy, 500)
    with pytest.raises(DamagedFile):
        read_file("trials", copy)
    assert len(store.load().trials) == 3


def test_a_damaged_run_is_left_out_and_the_newest_good_one_is_the_latest(store: Store) -> None:
    file = store.folder / "runs" / "run-1.parquet"
    flip(file, 300)
    with pytest.warns(DamagedFileWarning, match=r"run-1\.parquet"):
        assert store.run_ids() == ["run-0"]
    with pytest.warns(DamagedFileWarning):
        assert [row["run_id"] for row in store.newest_rows()] == ["run-0"]
    with pytest.warns(DamagedFileWarning), pytest.raises(DamagedRun, match="'run-1'"):
        store.run_row("run-1")
    (store.folder / "runs" / "run-0.parquet").write_bytes(b"")
    with pytest.warns(DamagedFileWarning), pytest.raises(NoRuns):
        store.load()


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 3])
def test_another_schema_version_is_refused(store: Store, version: int) -> None:
    file = trial_file(store, 0)
    rows = pq.read_table(file)
    pq.write_table(rows.replace_schema_metadata({VERSION_KEY: str(version)}), file)
    with pytest.raises(OtherSchema, match=rf"{version}.*{VERSION}"):
        store.load()
    (problem,) = check_folder(store).problems
    assert not problem.damaged


def test_the_command_moves_what_is_damaged_and_nothing_else(store: Store) -> None:
    file = trial_file(store, 1)
    content = file.read_bytes()[:-1]
    file.write_bytes(content)
    code, shown = ask(doctor, "--results", str(store.folder))
    assert code == 1
    assert f"{file.relative_to(store.folder)}:" in shown.replace("\n", "")
    assert file.exists()
    code, shown = ask(doctor, "--results", str(store.folder), "--repair", "--json")
    assert code == 0
    (row,) = json.loads(shown)["problems"]
    assert Path(row["moved_to"]).read_bytes() == content
    assert not file.exists()
    assert sorted(store.load().trials["trial"]) == [0, 2]
    assert ask(doctor, "--results", str(store.folder))[0] == 0


def test_what_is_moved_replaces_nothing(store: Store) -> None:
    places = set()
    for _ in range(3):
        trial_file(store, 1).write_bytes(b"")
        (problem,) = check_folder(store).problems
        places.add(quarantine(store, problem))
    assert len([place for place in places if place.exists()]) == 3
