"""Parquet files of a results folder, written atomically. Reads verify schema and page checksums
(CRC-32, parquet-format's `PageHeader.crc`)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import platform
import shutil
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cell.durable import replacing
from harness.cell.errors import DamagedFileWarning, NotRecorded, UsageError
from harness.record.profile_record import ProfileRecord
from harness.record.run_record import ConclusionRecord, RunRecord, StepRecord
from harness.record.table import Record, arrow_schema_of
from harness.record.trial import TrialRecord

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


@dataclass(frozen=True)
class TrialKey:
    cell_id: str
    trial: int
    attempt: int = 1

    @property
    def stem(self) -> str:
        return f"{self.cell_id}-t{self.trial}-a{self.attempt}"


_MAGIC = b"PAR1"


class DamagedFile(Exception):
    """A file is damaged or belongs to another table; the message says what is wrong. `column`: the
    column at fault; None if the whole file is."""

    def __init__(self, what: str, column: str = "") -> None:
        super().__init__(what)
        self.column = column


class OtherSchema(UsageError):
    """A file was written with a newer version of the schema."""


def writer_name() -> str:
    """Returns a name for this process that is unique among all nodes sharing the folder."""
    return f"{platform.node()}.{os.getpid()}"


def write_file(path: Path, schema: pa.Schema, parts: Iterable[pa.Table]) -> Path:
    """Writes a file atomically and syncs it to disk. Raises NotRecorded if the disk is full or
    read-only."""
    import pyarrow.parquet as pq

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            replacing(path) as temporary,
            open(temporary, "wb") as sink,
            pq.ParquetWriter(sink, schema, write_page_checksum=True) as writer,
        ):
            for part in parts:
                writer.write_table(part.cast(schema))
    except OSError as error:
        raise _not_recorded(path, error) from error
    return path


def _not_recorded(path: Path, error: OSError) -> NotRecorded:
    reason = error.strerror or type(error).__name__
    return NotRecorded(f"{str(path)!r} cannot be written: {reason}")


def is_complete(file: Path) -> bool:
    try:
        with open(file, "rb") as content:
            begin = content.read(4)
            content.seek(-4, os.SEEK_END)
            return begin == content.read(4) == _MAGIC
    except OSError:
        return False


def read_file(table: str, file: Path, columns: Sequence[str] = ()) -> pa.Table:
    """Reads all columns of a file, or only `columns`. Raises DamagedFile or OtherSchema.

    Columns that a file of an older schema lacks get their default.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = nullable(table, columns)
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as content:
            _require_schema(table, file, content.schema_arrow)
            rows = content.read(columns=schema.names)
            count = content.metadata.num_rows
        values = dict(zip(rows.column_names, rows.columns, strict=True))
        for column in TABLES[table].columns():
            if column.name in schema.names and column.name not in values:
                filled = pa.array([column.default] * count, schema.field(column.name).type)
                values[column.name] = filled
        return pa.table([values[name] for name in schema.names], schema=schema)
    except (OSError, pa.ArrowException, ValueError, MemoryError, OverflowError) as error:
        lines = str(error).strip().splitlines()
        raise DamagedFile(lines[0] if lines else type(error).__name__) from None


def parquet_schema(file: Path) -> pa.Schema:
    """Reads only the schema; raises DamagedFile."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_schema(file)
    except (OSError, pa.ArrowException, ValueError, MemoryError, OverflowError) as error:
        raise DamagedFile(str(error).strip().partition("\n")[0] or type(error).__name__) from None


def start_of_run(file: Path) -> datetime | None:
    """Reads when a run started, in any version of the schema; None for a damaged file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as content:
            (row,) = plain_rows(content.read(columns=["started_at"]))
        started = row["started_at"]
    except (OSError, pa.ArrowException, ValueError, KeyError, MemoryError, OverflowError):
        return None
    return started if isinstance(started, datetime) else None


def _require_schema(table: str, file: Path, schema: pa.Schema) -> None:
    other = f"it does not belong to table {table}"
    version = (schema.metadata or {}).get(VERSION_KEY.encode(), b"").decode(errors="replace")
    if not version.isdecimal():
        raise DamagedFile(f"{other}: it has no schema version")
    if int(version) > VERSION:
        raise OtherSchema(
            f"{str(file)!r} has schema {int(version)}, but this version of the suite reads schemas"
            f" up to {VERSION}: open it with the version that wrote it"
        )
    present = dict(zip(schema.names, schema.types, strict=True))
    for column, field in zip(TABLES[table].columns(), arrow_schema(table), strict=True):
        if field.name not in present:
            if int(version) == VERSION or column.default is dataclasses.MISSING:
                raise DamagedFile(f"{other}: column {field.name} is missing", field.name)
        elif present[field.name] != field.type:
            kinds = f"{present[field.name]} instead of {field.type}"
            raise DamagedFile(f"{other}: column {field.name} is {kinds}", field.name)


def read_undamaged(
    table: str, files: Sequence[Path], columns: Sequence[str] = ()
) -> list[pa.Table]:
    """Reads undamaged files; issues a DamagedFileWarning for each damaged file."""
    tables = []
    for file in files:
        try:
            tables.append(read_file(table, file, columns))
        except DamagedFile as problem:
            text = f"{str(file)!r} is damaged and was skipped: {problem}"
            warnings.warn(text, DamagedFileWarning, stacklevel=2)
    return tables


def read_frame(table: str, files: Sequence[Path]) -> pd.DataFrame:
    return frame_of(table, read_undamaged(table, files))


def frame_of(table: str, tables: Sequence[pa.Table]) -> pd.DataFrame:
    """Concatenates tables. Without tables, the frame is empty, with all columns."""
    import pyarrow as pa

    rows = pa.concat_tables(tables) if tables else nullable(table).empty_table()
    frame: pd.DataFrame = rows.combine_chunks().to_pandas()
    return frame


def plain_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Returns rows as plain Python values, with times in UTC. Unlike arrow's `to_pylist`, does not
    import pandas."""
    import pyarrow as pa

    times = [field.name for field in table.schema if pa.types.is_timestamp(field.type)]
    for name in times:
        index, zoneless = table.column_names.index(name), pa.timestamp("us")
        parts = [chunk.view(zoneless) for chunk in table.column(name).chunks]
        table = table.set_column(index, name, pa.chunked_array(parts, zoneless))
    rows: list[dict[str, Any]] = table.to_pylist()
    for row in rows:
        for name in times:
            row[name] = row[name] and row[name].replace(tzinfo=timezone.utc)
    return rows


def nullable(table: str, columns: Sequence[str] = ()) -> pa.Schema:
    """Returns a table's schema, or of only `columns`, with every field nullable."""
    import pyarrow as pa

    return pa.schema(
        [
            field.with_nullable(True)
            for field in arrow_schema(table)
            if not columns or field.name in columns
        ]
    )


_COPIED = "files"
"""Metadata key of a gathered copy: number of source files and digest of their names."""
_AT_ONCE = 200
"""Files copied at a time, to limit memory."""


@dataclass(frozen=True)
class RunFiles:
    folder: Path

    def of(self, table: str, run_id: str) -> list[Path]:
        """Returns a run's gathered copy if it is complete or nothing else is left. Otherwise
        returns its files, one per trial."""
        single, copy = self.single(table, run_id), self.copy(table, run_id)
        if not copy.exists():
            return single
        return [copy] if not single or self._has(table, run_id, single) else single

    def _has(self, table: str, run_id: str, files: Sequence[Path]) -> bool:
        return copied_digest(self.copy(table, run_id)) == names_digest(file.name for file in files)

    def gather(self, run_id: str) -> None:
        """Gathers a run's rows into one file per table, which is faster to read.

        Copies no table with a damaged file: the copy would count as complete without it.
        """
        import pyarrow as pa

        for table in ("trials", "steps"):
            files = self.single(table, run_id)
            if not files or self._has(table, run_id, files):
                continue
            parts = (
                pa.concat_tables(
                    [read_file(table, file) for file in files[i : i + _AT_ONCE]]
                ).combine_chunks()
                for i in range(0, len(files), _AT_ONCE)
            )
            with contextlib.suppress(DamagedFile):  # readers warn about it
                self.write_copy(table, run_id, files, parts)

    def write_copy(
        self, table: str, run_id: str, files: Sequence[Path], parts: Iterable[pa.Table]
    ) -> Path:
        metadata = {VERSION_KEY: str(VERSION), _COPIED: names_digest(f.name for f in files)}
        schema = nullable(table).with_metadata(metadata)
        return write_file(self.copy(table, run_id), schema, parts)

    def unpack(self, run_id: str) -> None:
        """Splits a gathered copy into a file per trial, so that trials can be added. All trials
        appear at once, at the end: readers would ignore the rest of the copy if only some had
        files."""
        self._split("steps", run_id, self.folder / "steps" / run_id)
        trials = self.folder / "trials" / run_id
        temporary = self.copy("trials", run_id).with_name(f".trials.{writer_name()}.tmp")
        try:
            self._split("trials", run_id, temporary)
            trials.parent.mkdir(parents=True, exist_ok=True)
            temporary.rename(trials)
        except OSError as error:
            if not self.single("trials", run_id):  # else another process has unpacked them
                raise _not_recorded(trials, error) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _split(self, table: str, run_id: str, folder: Path) -> None:
        copy = self.copy(table, run_id)
        if not copy.exists():
            return
        schema = nullable(table).with_metadata({VERSION_KEY: str(VERSION)})
        rows = read_file(table, copy)
        names = ("cell_id", "trial", "attempt")
        keys = zip(*(rows.column(name).to_pylist() for name in names), strict=True)
        places: dict[TrialKey, list[int]] = {}
        for index, key in enumerate(keys):
            places.setdefault(TrialKey(*key), []).append(index)
        for trial, of_trial in places.items():
            write_file(folder / f"{trial.stem}.parquet", schema, [rows.take(of_trial)])

    def copy(self, table: str, run_id: str) -> Path:
        return self.folder / "gathered" / run_id / f"{table}.parquet"

    def only_copied(self, run_id: str) -> bool:
        return self.copy("trials", run_id).exists() and not self.single("trials", run_id)

    def single(self, table: str, run_id: str) -> list[Path]:
        """Returns files of committed trials; empty if only the copy is left."""
        counted = sorted((self.folder / "trials" / run_id).glob("*.parquet"))
        if table == "trials":
            return counted
        files = [self.folder / table / run_id / trial.name for trial in counted]
        return [file for file in files if file.exists()]


def names_digest(files: Iterable[str]) -> str:
    ordered = sorted(files)
    names = "\n".join(ordered)
    return f"{len(ordered)} {hashlib.blake2s(names.encode(), digest_size=8).hexdigest()}"


def copied_digest(copy: Path) -> str | None:
    """Returns the digest of the files that a gathered copy was made from; None for other files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return str((pq.read_schema(copy).metadata or {})[_COPIED.encode()], "ascii")
    except (OSError, pa.ArrowException, KeyError, ValueError):
        return None


TABLES: dict[str, type[Record]] = {
    "runs": RunRecord,
    "trials": TrialRecord,
    "steps": StepRecord,
    "explained": ProfileRecord,
    "conclusions": ConclusionRecord,
}
VERSION = 16
"""Increase it when a column is added, changed or removed."""
FIRST_WITH_CELL_IDS = 12
"""First version whose cell ids are hashes of the same fields as today."""
VERSION_KEY = "parallelism_bench_schema_version"


@functools.cache
def arrow_schema(table: str) -> pa.Schema:
    return arrow_schema_of(TABLES[table]).with_metadata({VERSION_KEY: str(VERSION)})
