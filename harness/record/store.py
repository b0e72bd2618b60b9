"""Reads and writes results: append-only parquet files, written atomically.

- runs/RUN.parquet: one row, written before the first trial
- trials/RUN/CELL-tTRIAL-aATTEMPT.parquet: one row, which commits the trial
- steps/RUN/CELL-tTRIAL-aATTEMPT.parquet: the trial's steps
- explained/RUN/CELL-aATTEMPT.parquet: one profile of a cell
- conclusions/RUN/N.parquet: one row, written when the run ends for the N-th time
- gathered/RUN/trials.parquet, steps.parquet: copies of a run's rows, faster to read
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cell.errors import DamagedRun, NoRuns, NotRecorded, NotWritable, UsageError
from harness.record.files import (
    TABLES,
    DamagedFile,
    OtherSchema,
    RunFiles,
    arrow_schema,
    frame_of,
    is_complete,
    parquet_schema,
    plain_rows,
    read_file,
    read_frame,
    read_undamaged,
    start_of_run,
    write_file,
    writer_name,
)
from harness.record.files import TrialKey as TrialKey
from harness.record.profile_record import ProfileRecord
from harness.record.run_record import ConclusionRecord, RunRecord, StepRecord
from harness.record.table import Record, arrow_table
from harness.record.trial import TrialRecord

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TIMED_ID = re.compile(r"(\d{8}T\d{6})-")
"""Start of a run id that was made from the UTC time, not chosen."""


@dataclass(frozen=True)
class EndedTrial:
    cell_id: str
    cell_name: str
    trial: int
    attempt: int
    position: int
    status: str
    started_at: datetime
    wall_seconds: float | None
    turn_began: Sequence[float] = ()
    """Start of each turn of an interleaved trial, in seconds since the epoch."""

    @property
    def key(self) -> TrialKey:
        return TrialKey(self.cell_id, self.trial, self.attempt)


@dataclass(frozen=True)
class Results:
    runs: pd.DataFrame
    trials: pd.DataFrame
    steps: pd.DataFrame
    explained: pd.DataFrame = field(default_factory=lambda: read_frame("explained", []))
    conclusions: pd.DataFrame = field(default_factory=lambda: read_frame("conclusions", []))


class Store:
    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files = RunFiles(self.folder)

    def require_writable(self) -> None:
        """Raises NotWritable if the folder is not writable, without creating anything."""
        nearest = self.folder
        while not nearest.exists():
            nearest = nearest.parent
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise NotWritable(f"results folder {str(self.folder)!r} cannot be written")

    def require_run(self, run_id: str) -> None:
        """Raises NotRecorded if the run's file is gone: without it no reader would see its
        trials."""
        if not (self.folder / "runs" / f"{run_id}.parquet").exists():
            raise NotRecorded(
                f"run {run_id!r} is no longer in results folder {str(self.folder)!r}: the folder"
                " was removed, moved or unmounted"
            )

    def write_run(self, run: RunRecord) -> bool:
        path = self.folder / "runs" / f"{require_plain_name(run.run_id)}.parquet"
        return self._write_new("runs", path, run)

    def write_trial(self, trial: TrialRecord, steps: Iterable[StepRecord] = ()) -> Path:
        """Writes a trial's steps, then its row, which commits both."""
        if self._files.only_copied(trial.run_id):
            self._files.unpack(trial.run_id)
        file = f"{TrialKey(trial.cell_id, trial.trial, trial.attempt).stem}.parquet"
        steps = list(steps)
        if steps:
            self._write("steps", self.folder / "steps" / trial.run_id / file, steps)
        return self._write("trials", self.folder / "trials" / trial.run_id / file, [trial])

    def write_profile(self, profile: ProfileRecord) -> Path:
        folder = self.folder / "explained" / profile.run_id
        file = folder / f"{profile.cell_id}-a{profile.attempt}.parquet"
        return self._write("explained", file, [profile])

    def write_conclusion(self, conclusion: ConclusionRecord) -> Path:
        folder = self.folder / "conclusions" / conclusion.run_id
        number = len(list(folder.glob("*.parquet"))) + 1
        while not self._write_new("conclusions", folder / f"{number}.parquet", conclusion):
            number += 1
        return folder / f"{number}.parquet"

    def run_ids(self) -> list[str]:
        """Returns ids of complete runs, oldest first; checks only the last for damage."""
        files = [file for file in (self.folder / "runs").glob("*.parquet") if is_complete(file)]
        run_ids = [file.stem for file in sorted(files, key=_age)]
        while run_ids and not self._rows(run_ids[-1:]):
            run_ids.pop()
        return run_ids

    def run_row(self, run_id: str) -> dict[str, Any]:
        """Returns a run's row without reading its trials; raises DamagedRun."""
        for row in self._rows([run_id]):
            return row
        raise DamagedRun(f"the file of run {run_id!r} in {str(self.folder)!r} is damaged")

    def newest_rows(self) -> Iterator[dict[str, Any]]:
        for run_id in reversed(self.run_ids()):
            yield from self._rows([run_id])

    def _rows(self, run_ids: Sequence[str]) -> list[dict[str, Any]]:
        files = [self.folder / "runs" / f"{run_id}.parquet" for run_id in run_ids]
        return [row for rows in read_undamaged("runs", files) for row in plain_rows(rows)]

    def ended_trials(self, run_id: str) -> list[EndedTrial]:
        columns = tuple(field.name for field in fields(EndedTrial))
        tables = self._tables("trials", run_id, columns)
        return [EndedTrial(**row) for rows in tables for row in plain_rows(rows)]

    def statuses(self, run_id: str) -> dict[TrialKey, str]:
        return {trial.key: trial.status for trial in self.ended_trials(run_id)}

    def load(self, run_ids: Sequence[str] | None = None, *, steps: bool = True) -> Results:
        """Loads these runs, by default all, oldest first. Raises NoRuns, or UsageError for an
        unknown run."""
        recorded = self.run_ids()
        if not recorded:
            raise NoRuns(f"no runs in results folder {str(self.folder)!r}")
        requested = dict.fromkeys(recorded if run_ids is None else run_ids)
        for run_id in requested:
            if run_id not in recorded:
                raise UsageError(
                    f"no run {run_id!r} in {str(self.folder)!r}; the newest runs are:"
                    f" {', '.join(recorded[-5:])}"
                )
        wanted = [run_id for run_id in recorded if run_id in requested]
        runs = read_frame("runs", [self.folder / "runs" / f"{r}.parquet" for r in wanted])
        wanted = [run_id for run_id in wanted if run_id in set(runs["run_id"])]
        if not wanted:
            raise DamagedRun(
                f"the files of these runs in {str(self.folder)!r} are damaged; choose another run"
            )
        trials = self._frame("trials", wanted)
        explained, conclusions = (
            read_frame(
                table,
                [
                    file
                    for r in wanted
                    for file in sorted((self.folder / table / r).glob("*.parquet"))
                ],
            )
            for table in ("explained", "conclusions")
        )
        steps_frame = self._frame("steps", wanted if steps else [])
        return Results(runs, trials, steps_frame, explained, conclusions)

    def gather(self, run_id: str) -> None:
        self._files.gather(run_id)

    def remove(self, run_id: str) -> None:
        """Removes a run: first its row, without which no reader sees the rest. Raises UsageError
        if it is running."""
        with sole_writer(self.folder, run_id):
            (self.folder / "runs" / f"{run_id}.parquet").unlink()
            for table in (*TABLES, GATHERED):
                shutil.rmtree(self.folder / table / run_id, ignore_errors=True)

    def _frame(self, table: str, run_ids: Sequence[str]) -> pd.DataFrame:
        return frame_of(table, [part for r in run_ids for part in self._tables(table, r)])

    def _tables(self, table: str, run_id: str, columns: Sequence[str] = ()) -> list[pa.Table]:
        """Reads single files if a gathered copy is damaged."""
        files, copy = self._files.of(table, run_id), self._files.copy(table, run_id)
        if files == [copy] and (single := self._files.single(table, run_id)):
            try:
                return [read_file(table, copy, columns)]
            except DamagedFile:
                files = single
        return read_undamaged(table, files, columns)

    def steps_of(self, run_id: str, cell_id: str) -> pd.DataFrame:
        single, copy = self._files.single("steps", run_id), self._files.copy("steps", run_id)
        files = (
            [file for file in single if file.stem.startswith(f"{cell_id}-")]
            if single or not copy.exists()
            else [copy]
        )
        steps = read_frame("steps", files)
        return steps[steps["cell_id"] == cell_id].reset_index(drop=True)

    def _write_new(self, table: str, path: Path, row: Record) -> bool:
        mine = self._write(table, path.with_name(f".{path.stem}.{writer_name()}.begun"), [row])
        try:
            os.link(mine, path)
            return True
        except FileExistsError:
            return False
        finally:
            mine.unlink()

    def _write(self, table: str, path: Path, rows: Sequence[Record]) -> Path:
        schema = arrow_schema(table)
        return write_file(path, schema, [arrow_table(rows, schema)])


def _age(file: Path) -> tuple[str, str]:
    """Returns a sort key of a run's file: its start, taken from the id if that contains it, and the
    id."""
    if match := _TIMED_ID.match(file.stem):
        return match[1], file.stem
    started = start_of_run(file)
    # A damaged file comes last, where it is reported.
    return f"{started:%Y%m%dT%H%M%S%f}" if started else "damaged", file.stem


def require_plain_name(run_id: str) -> str:
    """Returns the run id; raises UsageError if it cannot name files."""
    if run_id == "index":
        raise UsageError("run name 'index': reports/html/index.html lists runs; use another name")
    if not is_plain_name(run_id):
        raise UsageError(
            f"run name {run_id!r} is not a plain file name: use up to 100 letters, digits, '.', '_'"
            " and '-', starting with a letter or digit"
        )
    return run_id


def is_plain_name(run_id: str) -> bool:
    return _PLAIN_NAME.fullmatch(run_id) is not None


def load(folder: str | Path = "results", run_ids: Sequence[str] | None = None) -> Results:
    return Store(folder).load(run_ids)


@contextlib.contextmanager
def sole_writer(
    folder: Path, run_id: str, share: tuple[int, int] = (0, 1), timeout_seconds: float = 0.0
) -> Iterator[None]:
    """Locks a run, or share i of n, for this process. Two processes would run the same trials, and
    one record would replace the other. Raises UsageError if another process holds the lock after
    `timeout_seconds`. Has no effect on file systems without locks."""
    number, of = share
    runs, deadline = folder / "runs", time.monotonic() + timeout_seconds
    wanted = [(runs / f".{run_id}.lock", fcntl.LOCK_EX if of == 1 else fcntl.LOCK_SH)]
    if of > 1:
        wanted.append((runs / f".{run_id}.{number}-of-{of}.lock", fcntl.LOCK_EX))
    with contextlib.ExitStack() as held:
        for file, how in wanted:
            try:
                held.callback(_release, file, _locked(file, how, deadline))
            except BlockingIOError:
                raise UsageError(
                    f"run {run_id!r} in {str(folder)!r} is already running in another process: wait"
                    " until it ends, or stop it"
                ) from None
            except OSError:  # No locks here, or a read-only folder, which is reported elsewhere.
                continue
        yield


def _locked(file: Path, how: int, deadline: float) -> int:
    """Raises BlockingIOError after `deadline` (time.monotonic)."""
    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            # The previous holder may have removed the file in the meantime.
            if file.exists() and os.path.samestat(os.fstat(descriptor), file.stat()):
                return descriptor
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise
            time.sleep(0.2)
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _release(file: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.unlink()
    os.close(descriptor)


QUARANTINE = "quarantine"
GATHERED = "gathered"
_JSON_NAMES: dict[type[object], str] = {dict: "object", list: "array"}


@dataclass(frozen=True)
class Problem:
    file: Path
    what: str
    damaged: bool = True
    """Whether the file is damaged; False if it is intact, but has another schema or inconsistent
    values."""
    column: str = ""
    row: int | None = None
    """Row of the value, from 0."""

    def __str__(self) -> str:
        where = f", column {self.column}" if self.column else ""
        where += "" if self.row is None else f", row {self.row}"
        return f"{self.file}{where}: {self.what}"


@dataclass(frozen=True)
class Checked:
    files: int
    problems: tuple[Problem, ...]
    foreign_names: tuple[str, ...] = ()
    """Code outside the suite, and models and data on a hub, that cells name."""


def check_folder(store: Store) -> Checked:
    problems: list[Problem] = []
    count = 0
    for table, file in files_of(store.folder):
        count += 1
        problems += file_problems(table, file)
    return Checked(count, tuple(problems))


def stores_below(folder: Path) -> Iterator[Store]:
    inside = {*TABLES, GATHERED, QUARANTINE}
    for root, names, _ in os.walk(folder):
        if {"runs", "trials", GATHERED} & set(names):
            yield Store(root)
        names[:] = sorted(set(names) - inside)


def file_problems(table: str, file: Path) -> Iterator[Problem]:
    """Yields why readers skip or reject a file."""
    try:
        _check(table, file)
    except DamagedFile as problem:
        yield Problem(file, str(problem), column=problem.column)
    except OtherSchema as other:
        yield Problem(file, str(other), damaged=False)


def table_of(file: Path) -> tuple[str, list[Problem]]:
    """Returns the table with most of a file's columns, and a problem if there is none."""
    try:
        names = set(parquet_schema(file).names)
    except DamagedFile as problem:
        return "", [Problem(file, str(problem))]
    shares = {
        table: len(names & columns) / len(columns)
        for table, cls in TABLES.items()
        if (columns := {column.name for column in cls.columns()})
    }
    best = max(shares, key=lambda table: shares[table])
    if shares[best] > 0.5:
        return best, []
    what = f"it has the columns of none of the tables {', '.join(TABLES)}"
    return "", [Problem(file, what)]


def quarantine(store: Store, file: Path) -> Path:
    """Moves a file to the quarantine folder without overwriting; returns its path."""
    target = store.folder / QUARANTINE / file.relative_to(store.folder)
    number = 0
    while target.exists():
        number += 1
        target = target.with_name(f"{file.name}.{number}")
    target.parent.mkdir(parents=True, exist_ok=True)
    file.rename(target)
    return target


def files_of(folder: Path) -> Iterator[tuple[str, Path]]:
    yield from (("runs", file) for file in sorted((folder / "runs").glob("*.parquet")))
    for table in TABLES.keys() - {"runs"}:
        yield from ((table, file) for file in sorted((folder / table).glob("*/*.parquet")))
        yield from ((table, file) for file in sorted(folder.glob(f"{GATHERED}/*/{table}.parquet")))


def _check(table: str, file: Path) -> None:
    rows = read_file(table, file)
    for column in TABLES[table].columns():
        if not column.nullable and rows.column(column.name).null_count:
            raise DamagedFile("it contains a null, which is not allowed", column.name)
    folder = _folder(file)
    if not len(rows) and folder != GATHERED:
        raise DamagedFile("it has no rows")
    if table == "runs" and len(rows) > 1:
        raise DamagedFile(f"it has {len(rows)} rows instead of one")
    if not folder:
        return
    runs = {file.stem if table == "runs" else file.parent.name}
    if len(rows) and set(rows.column("run_id").to_pylist()) != runs:
        raise DamagedFile(f"it has rows of a run other than {', '.join(runs)}", "run_id")
    if folder == GATHERED:
        return
    if table == "runs":
        if what := json_problem(rows.column("plan")[0].as_py(), dict):
            raise DamagedFile(what, "plan")
    elif table in ("trials", "steps"):
        columns = (rows.column(name).to_pylist() for name in ("cell_id", "trial", "attempt"))
        if {TrialKey(*key).stem for key in zip(*columns, strict=True)} != {file.stem}:
            raise DamagedFile("its rows belong to another trial than its name says")


def _folder(file: Path) -> str:
    names = (file.absolute().parent.name, file.absolute().parents[1].name)
    return next((name for name in names if name in (*TABLES, GATHERED)), "")


def json_problem(text: str, kind: type[object] = object) -> str:
    """Returns why a text is no JSON of this kind (dict or list), or empty."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"it is not JSON: {error}"
    return "" if isinstance(value, kind) else f"it is not a JSON {_JSON_NAMES[kind]}"
