"""Locates the rows of a run: one file per trial, or a copy of them all that reads faster and can be
rebuilt."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.record.files import nullable, read_file, read_undamaged, write_file
from harness.record.key import TrialKey
from harness.record.schema import VERSION, VERSION_KEY

if TYPE_CHECKING:
    import pyarrow as pa

_COPIED = "files"
"""Metadata key of a copy: number of its source files and a digest of their names."""
_AT_ONCE = 200
"""Files copied at a time, which bounds memory use."""


@dataclass(frozen=True)
class RunFiles:
    folder: Path

    def of(self, table: str, run_id: str) -> list[Path]:
        """Returns the files that hold a run's rows: the copy if up to date or all that is left,
        else the single files."""
        single, copy = self.single(table, run_id), self.copy(table, run_id)
        if not copy.exists():
            return single
        return [copy] if not single or self._has(table, run_id, single) else single

    def _has(self, table: str, run_id: str, files: Sequence[Path]) -> bool:
        return _copied(self.copy(table, run_id)) == _names_digest(files)

    def gather(self, run_id: str) -> None:
        """Copies a run's rows into one file per table: thousands of small files are slow to read.

        Keeps a copy that is complete or whose single files are gone.
        """
        import pyarrow as pa

        for table in ("trials", "steps"):
            files = self.single(table, run_id)
            if not files or self._has(table, run_id, files):
                continue
            parts = (
                pa.concat_tables(rows).combine_chunks()
                for i in range(0, len(files), _AT_ONCE)
                if (rows := read_undamaged(table, files[i : i + _AT_ONCE]))
            )
            self.write_copy(table, run_id, files, parts)

    def write_copy(
        self, table: str, run_id: str, files: Sequence[Path], parts: Iterable[pa.Table]
    ) -> Path:
        metadata = {VERSION_KEY: str(VERSION), _COPIED: _names_digest(files)}
        schema = nullable(table).with_metadata(metadata)
        return write_file(self.copy(table, run_id), schema, parts)

    def unpack(self, run_id: str) -> None:
        """Splits a copy into single files if only the copy is left. Otherwise single files of later
        trials would supersede it."""
        for table in ("steps", "trials"):
            copy = self.copy(table, run_id)
            if not copy.exists():
                continue
            schema = nullable(table).with_metadata({VERSION_KEY: str(VERSION)})
            rows = read_file(table, copy)
            names = ("cell_id", "trial", "attempt")
            keys = zip(*(rows.column(name).to_pylist() for name in names), strict=True)
            places: dict[TrialKey, list[int]] = {}
            for place, key in enumerate(keys):
                places.setdefault(TrialKey(*key), []).append(place)
            for trial, of_trial in places.items():
                file = self.folder / table / run_id / f"{trial.stem}.parquet"
                write_file(file, schema, [rows.take(of_trial)])

    def copy(self, table: str, run_id: str) -> Path:
        return self.folder / "gathered" / run_id / f"{table}.parquet"

    def only_copied(self, run_id: str) -> bool:
        """Returns whether only the copy of a run's trials is left."""
        return self.copy("trials", run_id).exists() and not self.single("trials", run_id)

    def single(self, table: str, run_id: str) -> list[Path]:
        """Returns the files of the trials that count; empty if only the copy is left."""
        counted = sorted((self.folder / "trials" / run_id).glob("*.parquet"))
        if table == "trials":
            return counted
        files = [self.folder / table / run_id / trial.name for trial in counted]
        return [file for file in files if file.exists()]


def _names_digest(files: Sequence[Path]) -> str:
    names = "\n".join(sorted(file.name for file in files))
    return f"{len(files)} {hashlib.blake2s(names.encode(), digest_size=8).hexdigest()}"


def _copied(copy: Path) -> str | None:
    """Returns what the copy says about its source files; None if it is missing or damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return str((pq.read_schema(copy).metadata or {})[_COPIED.encode()], "ascii")
    except (OSError, pa.ArrowException, KeyError, ValueError):
        return None
