"""Reading and writing results: append-only parquet files, each whole or absent.

results/runs/RUN.parquet                        one row, written before the first trial
results/trials/RUN/CELL-tTRIAL-aATTEMPT.parquet one row; the commit record of a trial
results/steps/RUN/CELL-tTRIAL-aATTEMPT.parquet  its steps, written before that
results/explained/RUN/CELL-aATTEMPT.parquet     one row, of a launch that explains a cell
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import Mistake
from harness.schema import TABLES, arrow_schema

if TYPE_CHECKING:
    import pandas as pd

Row = Mapping[str, Any]


@dataclass(frozen=True)
class TrialKey:
    """Identity of a trial's record within a run."""

    cell_id: str
    trial: int
    attempt: int = 1

    @property
    def stem(self) -> str:
        return f"{self.cell_id}-t{self.trial}-a{self.attempt}"

    @classmethod
    def parse(cls, stem: str) -> TrialKey:
        cell_id, trial, attempt = stem.rsplit("-", 2)
        return cls(cell_id, int(trial[1:]), int(attempt[1:]))


@dataclass(frozen=True)
class Results:
    """The tables of one or several runs as pandas frames, columns as in harness/schema.py."""

    runs: pd.DataFrame
    trials: pd.DataFrame
    steps: pd.DataFrame
    explained: pd.DataFrame = field(default_factory=lambda: _read("explained", []))


class Store:
    """A results folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def require_writable(self) -> None:
        """Raises Mistake where nothing can be written; leaves nothing behind."""
        nearest = self.folder
        while not nearest.exists():
            nearest = nearest.parent
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise Mistake(f"results folder {str(self.folder)!r} cannot be written; choose another with --results DIR")

    def write_run(self, row: Row) -> Path:
        return self._write("runs", self.folder / "runs" / f"{row['run_id']}.parquet", [row])

    def write_trial(self, row: Row, steps: Iterable[Row]) -> Path:
        """Steps first: the trial's own row makes both count."""
        key = TrialKey(row["cell_id"], row["trial"], row["attempt"])
        steps = list(steps)
        if steps:
            self._write("steps", self.folder / "steps" / row["run_id"] / f"{key.stem}.parquet", steps)
        return self._write("trials", self.folder / "trials" / row["run_id"] / f"{key.stem}.parquet", [row])

    def write_explained(self, row: Row) -> Path:
        file = f"{row['cell_id']}-a{row['attempt']}.parquet"
        return self._write("explained", self.folder / "explained" / row["run_id"] / file, [row])

    def run_ids(self) -> list[str]:
        """All runs, oldest first."""
        return sorted(path.stem for path in (self.folder / "runs").glob("*.parquet"))

    def recorded(self, run_id: str) -> list[TrialKey]:
        """The trials of a run that have their record."""
        return [TrialKey.parse(path.stem) for path in sorted((self.folder / "trials" / run_id).glob("*.parquet"))]

    def load(self, run_ids: Sequence[str] | None = None, *, steps: bool = True) -> Results:
        """The tables of these runs, or of all. Raises Mistake for a run that is not there."""
        known = self.run_ids()
        if not known:
            raise Mistake(f"no runs in results folder {str(self.folder)!r}; make one with: python -m bench run --matrix smoke")
        wanted = known if run_ids is None else list(run_ids)
        for run_id in wanted:
            if run_id not in known:
                raise Mistake(f"no run {run_id!r} in {str(self.folder)!r}; its runs are: {', '.join(known[-5:])}")
        runs = _read("runs", [self.folder / "runs" / f"{r}.parquet" for r in wanted])
        files = [path for r in wanted for path in sorted((self.folder / "trials" / r).glob("*.parquet"))]
        trials = _read("trials", files)
        step_files = [f for path in files if (f := self.folder / "steps" / path.parent.name / path.name).exists()]
        explained = [path for r in wanted for path in sorted((self.folder / "explained" / r).glob("*.parquet"))]
        return Results(runs, trials, _read("steps", step_files if steps else []), _read("explained", explained))

    def steps_of(self, run_id: str, cell_id: str) -> pd.DataFrame:
        """Table `steps` of one cell of a run, without reading that of the others."""
        found = sorted((self.folder / "steps" / run_id).glob(f"{cell_id}-t*.parquet"))
        return _read("steps", [path for path in found if (self.folder / "trials" / run_id / path.name).exists()])

    def _write(self, table: str, path: Path, rows: Sequence[Row]) -> Path:
        import pyarrow as pa
        import pyarrow.parquet as pq

        path.parent.mkdir(parents=True, exist_ok=True)
        names = [name for name, _, _ in TABLES[table]]
        for row in rows:
            if unknown := set(row) - set(names):
                raise ValueError(f"columns not in schema {table}: {sorted(unknown)}")
        data = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows], schema=arrow_schema(table))
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "wb") as sink:
                pq.write_table(data, sink)
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


def load(folder: str | Path = "results", run_ids: Sequence[str] | None = None) -> Results:
    """Everything recorded in a results folder as pandas frames."""
    return Store(folder).load(run_ids)


def _read(table: str, files: Sequence[Path]) -> pd.DataFrame:
    """Files of any schema version; columns that a file's version did not have are null."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = arrow_schema(table)
    loose = pa.schema([field.with_nullable(True) for field in schema])
    tables = [pq.ParquetFile(file).read() for file in files]
    fitted = [_fit(one, loose) for one in tables]
    whole = pa.concat_tables(fitted) if fitted else loose.empty_table()
    frame: pd.DataFrame = whole.to_pandas()
    return frame


def _fit(table: Any, schema: Any) -> Any:
    import pyarrow as pa

    present = set(table.column_names)
    columns = [table.column(f.name).cast(f.type) if f.name in present else pa.nulls(len(table), f.type) for f in schema]
    return pa.table(columns, schema=schema)
