"""Damaged files are found, skipped with a warning and moved away, never read as if intact.

Intact files with contradictory values are found too.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bench.cli.check import check
from harness.analysis import consistency
from harness.cell.cell import Cell
from harness.cell.errors import DamagedFileWarning, DamagedRun, NoRuns
from harness.record.files import (
    VERSION,
    VERSION_KEY,
    DamagedFile,
    OtherSchema,
    arrow_schema,
    read_file,
    write_file,
)
from harness.record.run_record import RunRecord
from harness.record.store import Store, TrialKey, check_folder, quarantine
from harness.record.trial import TrialRecord
from tests.commands import ask
from tests.unit.stored_trials import one_cell_run, step, trial_row

CELL = Cell(strategy="single")
KEYS = [TrialKey(CELL.id, trial) for trial in range(3)]
REFERENCE = Path(__file__).parents[2] / "results" / "reference"
RUN = "20261128T064652-090b"
VERIFIED = {
    "losses": [4.0, 3.5],
    "reference_losses": [4.0, 3.5],
    "parity_max_update_deviation": 0.0,
    "parity_loss_tolerance": 1e-6,
    "parity_update_tolerance": 1e-4,
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two runs; the newer one has three trials of one step each."""
    made = Store(tmp_path / "results")
    for run_id in ("run-0", "run-1"):
        made.write_run(RunRecord(**one_cell_run(run_id)))
    for key in KEYS:
        made.write_trial(TrialRecord(**trial_row(CELL, key.trial, **VERIFIED)), [step(key)])
    return made


def trial_file(store: Store, trial: int) -> Path:
    return store.folder / "trials" / "run-1" / f"{KEYS[trial].stem}.parquet"


def flip(file: Path, place: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << bit
    file.write_bytes(content)


def test_good_folders_have_no_problem(store: Store) -> None:
    store.gather("run-1")
    checked = check_folder(store)
    assert (checked.files, checked.problems) == (10, ())
    checked = consistency.check(REFERENCE.parent)
    assert checked.files > 20
    assert checked.problems == ()


def test_flipped_bits_are_found_wherever_they_are(store: Store) -> None:
    """An undetected flip in the file leaves its rows unchanged."""
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


def test_a_newer_schema_version_is_refused(store: Store) -> None:
    file, version = trial_file(store, 0), VERSION + 3
    rows = pq.read_table(file)
    pq.write_table(rows.replace_schema_metadata({VERSION_KEY: str(version)}), file)
    with pytest.raises(OtherSchema, match=rf"{version}.*{VERSION}"):
        store.load()
    (problem,) = check_folder(store).problems
    assert not problem.damaged


def test_columns_that_an_older_schema_lacks_have_their_defaults(store: Store) -> None:
    file, lacking = trial_file(store, 0), ["step_seconds_p50", "packages", "rewinds"]
    whole = pq.read_table(file)
    older = whole.drop_columns(lacking).append_column("gone", pa.array([1]))
    pq.write_table(older.replace_schema_metadata({VERSION_KEY: str(VERSION - 1)}), file)
    assert check_folder(store).problems == ()
    (row,) = read_file("trials", file).to_pylist()
    assert [row[name] for name in lacking] == [None, [], None]
    assert row.keys() == set(whole.column_names)
    assert read_file("trials", file, lacking[:1]).to_pylist() == [{lacking[0]: None}]
    pq.write_table(older.replace_schema_metadata({VERSION_KEY: str(VERSION)}), file)
    with pytest.raises(DamagedFile, match="missing"):
        read_file("trials", file)
    required = whole.drop_columns("strategy")
    pq.write_table(required.replace_schema_metadata({VERSION_KEY: str(VERSION - 1)}), file)
    with pytest.raises(DamagedFile, match="column strategy is missing"):
        read_file("trials", file)


def test_the_command_moves_only_damaged_files(store: Store) -> None:
    file = trial_file(store, 1)
    content = file.read_bytes()[:-1]
    file.write_bytes(content)
    code, shown = ask(check, str(store.folder))
    assert code == 2
    assert f"{file}:" in shown.replace("\n", "")
    assert file.exists()
    code, shown = ask(check, str(store.folder), "--repair", "--json")
    assert code == 0
    (row,) = json.loads(shown)["problems"]
    assert Path(row["moved_to"]).read_bytes() == content
    assert not file.exists()
    assert sorted(store.load().trials["trial"]) == [0, 2]
    assert ask(check, str(store.folder))[0] == 0


def test_a_damaged_file_stays_in_its_own_results_folder(store: Store) -> None:
    inner = Store(store.folder / "of-a-colleague")
    inner.write_run(RunRecord(**one_cell_run("run-2")))
    (inner.folder / "runs" / "run-2.parquet").write_bytes(b"")
    ask(check, str(store.folder), "--repair")
    assert (inner.folder / "quarantine" / "runs" / "run-2.parquet").exists()


def test_a_run_with_several_rows_is_a_problem(store: Store) -> None:
    file = store.folder / "runs" / "run-1.parquet"
    rows = read_file("runs", file)
    write_file(file, arrow_schema("runs"), [rows, rows])
    (problem,) = check_folder(store).problems
    assert problem.file == file


@pytest.mark.parametrize("column", ["plan", "libraries"])
@pytest.mark.parametrize("text", ["[" * 10**5, "[]", "3"], ids=["too deep", "array", "number"])
def test_json_of_another_kind_is_a_problem(store: Store, column: str, text: str) -> None:
    store.write_run(RunRecord(**(one_cell_run("run-2") | {column: text})))
    (problem,) = consistency.check(store.folder).problems
    assert (problem.file.stem, problem.column) == ("run-2", column)


def test_moved_files_replace_nothing(store: Store) -> None:
    places = set()
    for _ in range(3):
        trial_file(store, 1).write_bytes(b"")
        (problem,) = check_folder(store).problems
        places.add(quarantine(store, problem.file))
    assert len([place for place in places if place.exists()]) == 3


@pytest.fixture(scope="module")
def rows() -> pa.Table:
    """Two trials of the reference run: the first exact one and the first that diverged."""
    whole = read_file("trials", REFERENCE / "gathered" / RUN / "trials.parquet")
    verdicts = whole.column("parity_verdict").to_pylist()
    return whole.take([verdicts.index("exact"), verdicts.index("diverged")])


def planted(rows: pa.Table, file: Path, row: int, **values: object) -> Path:
    """Writes a file in which one row has other values; returns its path."""
    changed = rows.to_pylist()
    changed[row] |= values
    schema = arrow_schema("trials")
    nullable = pa.schema([f.with_nullable(True) for f in schema], metadata=schema.metadata)
    return write_file(file, nullable, [pa.Table.from_pylist(changed, schema=nullable)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "values", "column"),
    [
        (0, {"parity_max_update_deviation": 0.5}, "parity_verdict"),
        (0, {"parity_max_update_deviation": None}, "parity_max_update_deviation"),
        (0, {"reference_losses": []}, "reference_losses"),
        (0, {"parity_verdict": "verified"}, "parity_verdict"),
        (0, {"parity_verdict": "diverged", "parity_reason": "x"}, "parity_verdict"),
        (1, {"parity_verdict": "exact"}, "parity_verdict"),
        (1, {"parity_reason": ""}, "parity_reason"),
        (1, {"reason": ""}, "reason"),
        (0, {"samples_per_second": 1e5, "tokens_per_second": None}, "samples_per_second"),
        (0, {"tokens_per_second": 1.0}, "tokens_per_second"),
        (0, {"step_seconds_p95": 1e-9}, "step_seconds_p95"),
        (0, {"peak_memory_bytes": 1}, "peak_memory_bytes"),
        (0, {"wall_seconds": -1.0}, "wall_seconds"),
        (0, {"mfu": 1.5}, "mfu"),
        (0, {"cell_id": "0123456789ab"}, "cell_id"),
        (0, {"cell": "{}"}, "cell"),
        (0, {"data_fingerprint": "none"}, "data_fingerprint"),
        (0, {"schema_version": VERSION + 1}, "schema_version"),
        (0, {"workload": None}, "workload"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_value_that_contradicts_others_is_a_problem(
    rows: pa.Table, tmp_path: Path, row: int, values: dict[str, object], column: str
) -> None:
    assert consistency.check(planted(rows, tmp_path / "good.parquet", row)).problems == ()
    found = consistency.check(planted(rows, tmp_path / "trials.parquet", row, **values)).problems
    assert column in {problem.column for problem in found}
    assert {problem.row for problem in found} <= {row, None}


def test_slow_exchanges_every_few_steps_are_no_contradiction(
    rows: pa.Table, tmp_path: Path
) -> None:
    """Three local steps of 10 ms and one that takes 150 ms."""
    row = rows.slice(0, 1).to_pylist()[0]
    rate = row["global_batch"] / 0.045
    cycle = {"step_seconds_p50": 0.01, "step_seconds_p95": 0.15, "step_seconds_mean": 0.045}
    cycle |= {"samples_per_second": rate, "tokens_per_second": rate * row["sequence_length"]}
    found = consistency.check(planted(rows, tmp_path / "trials.parquet", 0, **cycle)).problems
    assert "samples_per_second" not in {problem.column for problem in found}


def test_rows_that_were_removed_or_repeated_are_found(store: Store) -> None:
    store.gather("run-1")
    for file in (store.folder / "trials" / "run-1").iterdir():
        file.unlink()
    assert consistency.check(store.folder).problems == ()
    copy = store.folder / "gathered" / "run-1" / "trials.parquet"
    whole = pq.read_table(copy)
    for indices in ([0, 1], [0, 1, 2, 2]):
        write_file(copy, whole.schema, [whole.take(indices)])
        assert consistency.check(store.folder).problems
        assert ask(check, str(store.folder))[0] == 2


def test_trials_without_their_run_are_a_problem(store: Store) -> None:
    (store.folder / "runs" / "run-1.parquet").unlink()
    folders = {problem.file.name for problem in consistency.check(store.folder).problems}
    assert folders == {"run-1"}
