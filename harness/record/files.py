"""Reads and writes single parquet files of a results folder.

Writes are atomic. Reads verify the checksum of each page (CRC-32, parquet-format's
`PageHeader.crc`) and compare the footer with the table's schema.
"""

from __future__ import annotations

import contextlib
import os
import platform
import warnings
from collections.abc import Iterable, Sequence
from datetime import timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.record.schema import TABLES, VERSION, VERSION_KEY, arrow_schema
from harness.spec.errors import DamagedFileWarning, NotRecorded, UsageError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_MAGIC = b"PAR1"


class DamagedFile(Exception):
    """A file was damaged or is not of this table; the message says how."""


class NewerSchema(UsageError):
    """A file was written by a newer version of the suite."""


def writer_name() -> str:
    """Returns a name unique to this process among all nodes that share the folder."""
    return f"{platform.node()}.{os.getpid()}"


def write_file(path: Path, schema: pa.Schema, parts: Iterable[pa.Table]) -> Path:
    """Writes a complete file or none; it is on disk on return. Raises NotRecorded if the disk is
    full or read-only."""
    import pyarrow.parquet as pq

    temporary = path.with_name(f".{path.name}.{writer_name()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as sink:
            with pq.ParquetWriter(sink, schema, write_page_checksum=True) as writer:
                for part in parts:
                    writer.write_table(part.cast(schema))
            sink.flush()
            os.fsync(sink.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            reason = error.strerror or type(error).__name__
            raise NotRecorded(f"{str(path)!r} cannot be written: {reason}") from error
        raise
    return path


def is_complete(file: Path) -> bool:
    """Returns whether a file begins and ends like parquet; reads 8 bytes."""
    try:
        with open(file, "rb") as content:
            begin = content.read(4)
            content.seek(-4, os.SEEK_END)
            return begin == content.read(4) == _MAGIC
    except OSError:
        return False


def read_file(table: str, file: Path, columns: Sequence[str] = ()) -> pa.Table:
    """Returns a file's rows with all current columns, or `columns`; null if its version lacks one.

    Raises DamagedFile, or NewerSchema.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = nullable(table, columns)
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as content:
            version = _version(file, content.schema_arrow)
            if problem := _mismatch(table, content.schema_arrow, version):
                raise DamagedFile(f"it is no file of table {table}: {problem}")
            rows = content.read(columns=schema.names)
        present = dict(zip(rows.column_names, rows.columns, strict=True))
        return pa.table(
            [_as(present.get(f.name), f.type, len(rows)) for f in schema], schema=schema
        )
    except (OSError, pa.ArrowException, ValueError, MemoryError, OverflowError) as error:
        lines = str(error).strip().splitlines()
        raise DamagedFile(lines[0] if lines else type(error).__name__) from None


def _as(column: pa.ChunkedArray | None, kind: pa.DataType, rows: int) -> pa.ChunkedArray | pa.Array:
    """Returns the column in this type, or nulls. Casts only if needed: importing arrow's functions
    takes longer than reading a file."""
    import pyarrow as pa

    if column is None:
        return pa.nulls(rows, kind)
    return column if column.type == kind else column.cast(kind)


def _version(file: Path, schema: pa.Schema) -> int | None:
    """Returns the file's schema version; None for copies of several files."""
    text = (schema.metadata or {}).get(VERSION_KEY.encode())
    if text is None:
        return None
    if not text.isdigit():
        raise DamagedFile("its schema version is no number")
    if int(text) > VERSION:
        raise NewerSchema(
            f"{str(file)!r} was written by a newer version of the suite (schema {int(text)}, this"
            f" one reads up to {VERSION}): update the suite to read it"
        )
    return int(text)


def _mismatch(table: str, schema: pa.Schema, version: int | None) -> str:
    """Returns how a file's columns differ from its version's; empty if they match. Copies have all
    columns of the version that made them."""
    known = 1 if version is None else version
    present = dict(zip(schema.names, schema.types, strict=True))
    for column, field in zip(TABLES[table].columns(), arrow_schema(table), strict=True):
        if column.since > known:
            continue
        if column.name not in present:
            return f"column {column.name} is missing"
        if present[column.name] != field.type:
            return f"column {column.name} is {present[column.name]}"
    return ""


def read_undamaged(
    table: str, files: Sequence[Path], columns: Sequence[str] = ()
) -> list[pa.Table]:
    """Returns the rows of each undamaged file; warns DamagedFileWarning for the others."""
    tables = []
    for file in files:
        try:
            tables.append(read_file(table, file, columns))
        except DamagedFile as problem:
            text = f"{str(file)!r} is damaged and was left out: {problem}"
            warnings.warn(text, DamagedFileWarning, stacklevel=2)
    return tables


def read_frame(table: str, files: Sequence[Path], columns: Sequence[str] = ()) -> pd.DataFrame:
    """Returns the undamaged files' rows as one frame."""
    return frame_of(table, read_undamaged(table, files, columns), columns)


def frame_of(table: str, tables: Sequence[pa.Table], columns: Sequence[str] = ()) -> pd.DataFrame:
    """Returns the rows of these tables as one frame; without tables, an empty one with all
    columns."""
    import pyarrow as pa

    rows = pa.concat_tables(tables) if tables else nullable(table, columns).empty_table()
    frame: pd.DataFrame = rows.combine_chunks().to_pandas()
    return frame


def plain_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Returns the rows as plain Python values; times are in UTC.

    Avoids arrow's `to_pylist`, which imports pandas for times with a zone. That takes longer than
    most commands that need single rows.
    """
    import pyarrow as pa

    times = [field.name for field in table.schema if pa.types.is_timestamp(field.type)]
    for name in times:
        place, zoneless = table.column_names.index(name), pa.timestamp("us")
        parts = [chunk.view(zoneless) for chunk in table.column(name).chunks]
        table = table.set_column(place, name, pa.chunked_array(parts, zoneless))
    rows: list[dict[str, Any]] = table.to_pylist()
    for row in rows:
        for name in times:
            row[name] = row[name] and row[name].replace(tzinfo=timezone.utc)
    return rows


def nullable(table: str, columns: Sequence[str] = ()) -> pa.Schema:
    """Returns the table's schema, or that of `columns`, with every field nullable."""
    import pyarrow as pa

    return pa.schema(
        [
            field.with_nullable(True)
            for field in arrow_schema(table)
            if not columns or field.name in columns
        ]
    )
