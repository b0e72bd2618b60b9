"""Reading and writing results: append-only parquet files, each complete or absent.

results/runs/RUN.parquet                        one row, written before the first trial
results/trials/RUN/CELL-tTRIAL-aATTEMPT.parquet one row; the commit record of a trial
results/steps/RUN/CELL-tTRIAL-aATTEMPT.parquet  its steps, written before that
results/explained/RUN/CELL-aATTEMPT.parquet     one row, of a launch that explains a cell
results/gathered/RUN/trials.parquet, steps.parquet   copies of a run's rows, only to be read faster
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.record.profile import ProfileRecord
from harness.record.run import RunRecord
from harness.record.schema import arrow_schema
from harness.record.step import StepRecord
from harness.record.table import Record, arrow_table
from harness.record.trial import TrialRecord
from harness.spec.errors import NoRuns, NotWritable, UsageError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_COPIED = "files"
"""Key in the metadata of a run's copy: how many files it holds."""
_AT_ONCE = 200
"""Files copied at a time, which bounds the memory that it takes."""


@dataclass(frozen=True)
class TrialKey:
    """Identity of a trial's record within a run."""

    cell_id: str
    trial: int
    attempt: int = 1

    @property
    def stem(self) -> str:
        return f"{self.cell_id}-t{self.trial}-a{self.attempt}"


@dataclass(frozen=True)
class Results:
    """The tables of one or several runs as pandas frames, columns as in
    harness/record/schema.py."""

    runs: pd.DataFrame
    trials: pd.DataFrame
    steps: pd.DataFrame
    explained: pd.DataFrame = field(default_factory=lambda: _read("explained", []))


class Store:
    """A results folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def require_writable(self) -> None:
        """Raises NotWritable where nothing can be written; leaves nothing behind."""
        nearest = self.folder
        while not nearest.exists():
            nearest = nearest.parent
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise NotWritable(f"results folder {str(self.folder)!r} cannot be written")

    def write_run(self, run: RunRecord) -> bool:
        """False where the run is there already: where several begin the same run, the first one's
        record counts."""
        path = self.folder / "runs" / f"{run.run_id}.parquet"
        mine = self._write("runs", path.with_name(f".{path.stem}.{_who()}.begun"), [run])
        try:
            os.link(mine, path)
            return True
        except FileExistsError:
            return False
        finally:
            mine.unlink()

    def write_trial(self, trial: TrialRecord, steps: Iterable[StepRecord] = ()) -> Path:
        """Steps first: the trial's own row makes both count."""
        file = f"{TrialKey(trial.cell_id, trial.trial, trial.attempt).stem}.parquet"
        steps = list(steps)
        if steps:
            self._write("steps", self.folder / "steps" / trial.run_id / file, steps)
        return self._write("trials", self.folder / "trials" / trial.run_id / file, [trial])

    def write_profile(self, profile: ProfileRecord) -> Path:
        folder = self.folder / "explained" / profile.run_id
        file = folder / f"{profile.cell_id}-a{profile.attempt}.parquet"
        return self._write("explained", file, [profile])

    def run_ids(self) -> list[str]:
        """All runs, oldest first."""
        return sorted(path.stem for path in (self.folder / "runs").glob("*.parquet"))

    def run_row(self, run_id: str) -> dict[str, Any]:
        """The row of a run in table `runs`, without reading its trials."""
        return dict(_read("runs", [self.folder / "runs" / f"{run_id}.parquet"]).iloc[0])

    def statuses(self, run_id: str) -> dict[TrialKey, str]:
        """How each trial of a run that has its record ended."""
        columns = ("cell_id", "trial", "attempt", "status")
        trials = _read("trials", self._files("trials", run_id), columns)
        return {TrialKey(*key): status for *key, status in trials.itertuples(index=False)}

    def load(self, run_ids: Sequence[str] | None = None, *, steps: bool = True) -> Results:
        """The tables of these runs, or of all. Raises NoRuns without any, UsageError for a run that
        is not there."""
        recorded = self.run_ids()
        if not recorded:
            raise NoRuns(f"no runs in results folder {str(self.folder)!r}")
        wanted = recorded if run_ids is None else list(run_ids)
        for run_id in wanted:
            if run_id not in recorded:
                raise UsageError(
                    f"no run {run_id!r} in {str(self.folder)!r}; its runs are:"
                    f" {', '.join(recorded[-5:])}"
                )
        runs = _read("runs", [self.folder / "runs" / f"{r}.parquet" for r in wanted])
        trials = _read("trials", [path for r in wanted for path in self._files("trials", r)])
        step_files = [path for r in wanted for path in self._files("steps", r)] if steps else []
        explained = [
            path
            for r in wanted
            for path in sorted((self.folder / "explained" / r).glob("*.parquet"))
        ]
        return Results(runs, trials, _read("steps", step_files), _read("explained", explained))

    def gather(self, run_id: str) -> None:
        """Copies a run's rows into one file per table: thousands of small files take long to read.

        Adds nothing to what is recorded.
        """
        import pyarrow as pa

        for table in ("trials", "steps"):
            files = self._single(table, run_id)
            schema = _nullable(table).with_metadata({_COPIED: str(len(files))})
            parts = (
                pa.concat_tables(_tables(table, files[i : i + _AT_ONCE])).combine_chunks()
                for i in range(0, len(files), _AT_ONCE)
            )
            self._write_file(self._copy(table, run_id), schema, parts)

    def _copy(self, table: str, run_id: str) -> Path:
        return self.folder / "gathered" / run_id / f"{table}.parquet"

    def _single(self, table: str, run_id: str) -> list[Path]:
        """The files of the trials that count; none where only the copy was kept."""
        counted = sorted((self.folder / "trials" / run_id).glob("*.parquet"))
        files = [self.folder / table / run_id / trial.name for trial in counted]
        return [file for file in files if file.exists()]

    def _files(self, table: str, run_id: str) -> list[Path]:
        """Where the rows of a run are: in the copy, if that is as new as they are or all that was
        kept, else each in its own file."""
        single, copy = self._single(table, run_id), self._copy(table, run_id)
        if not copy.exists():
            return single
        import pyarrow.parquet as pq

        copied = pq.read_schema(copy).metadata.get(_COPIED.encode())
        return [copy] if not single or copied == str(len(single)).encode() else single

    def steps_of(self, run_id: str, cell_id: str) -> pd.DataFrame:
        """Table `steps` of one cell of a run, without reading that of the others."""
        single, copy = self._single("steps", run_id), self._copy("steps", run_id)
        files = (
            [file for file in single if file.stem.startswith(f"{cell_id}-")]
            if single or not copy.exists()
            else [copy]
        )
        steps = _read("steps", files)
        return steps[steps["cell_id"] == cell_id].reset_index(drop=True)

    def _write(self, table: str, path: Path, rows: Sequence[Record]) -> Path:
        schema = arrow_schema(table)
        return self._write_file(path, schema, [arrow_table(rows, schema)])

    def _write_file(self, path: Path, schema: pa.Schema, parts: Iterable[pa.Table]) -> Path:
        """Writes a complete file or none."""
        import pyarrow.parquet as pq

        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{_who()}.tmp")
        try:
            with open(temporary, "wb") as sink:
                with pq.ParquetWriter(sink, schema) as writer:
                    for part in parts:
                        writer.write_table(part.cast(schema))
                sink.flush()
                os.fsync(sink.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return path


def _who() -> str:
    """This process among all that share the folder, on whichever node."""
    return f"{platform.node()}.{os.getpid()}"


def load(folder: str | Path = "results", run_ids: Sequence[str] | None = None) -> Results:
    """Everything recorded in a results folder as pandas frames."""
    return Store(folder).load(run_ids)


def _read(table: str, files: Sequence[Path], columns: Sequence[str] = ()) -> pd.DataFrame:
    """Files of any schema version, all columns or these; columns that a file's version did not have
    are null."""
    import pyarrow as pa

    rows = (
        pa.concat_tables(_tables(table, files, columns))
        if files
        else _nullable(table, columns).empty_table()
    )
    frame: pd.DataFrame = rows.combine_chunks().to_pandas()
    return frame


def _nullable(table: str, columns: Sequence[str] = ()) -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        [
            field.with_nullable(True)
            for field in arrow_schema(table)
            if not columns or field.name in columns
        ]
    )


def _tables(table: str, files: Sequence[Path], columns: Sequence[str] = ()) -> list[pa.Table]:
    """Each file's rows in the columns of today's schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema, tables = _nullable(table, columns), []
    for rows in (pq.ParquetFile(file).read(columns=schema.names) for file in files):
        present = set(rows.column_names)
        cast = [
            rows.column(f.name).cast(f.type) if f.name in present else pa.nulls(len(rows), f.type)
            for f in schema
        ]
        tables.append(pa.table(cast, schema=schema))
    return tables
