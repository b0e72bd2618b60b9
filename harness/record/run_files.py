"""Where the rows of a run are: each trial in a file of its own, or all in a copy, which is there to
be read faster and can be made anew."""

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
"""Key in the metadata of a run's copy: the number of files it was made of, and a digest of their
names."""
_AT_ONCE = 200
"""Files copied at a time, which bounds the memory that it takes."""


@dataclass(frozen=True)
class RunFiles:
    """The files of table `trials` or `steps` in a results folder, by run."""

    folder: Path

    def of(self, table: str, run_id: str) -> list[Path]:
        """Where the rows of a run are: in the copy, if that is as new as they are or all that was
        kept, else each in its own file."""
        single, copy = self.single(table, run_id), self.copy(table, run_id)
        if not copy.exists():
            return single
        return [copy] if not single or self._has(table, run_id, single) else single

    def _has(self, table: str, run_id: str, files: Sequence[Path]) -> bool:
        """Whether the run's copy was made of exactly these files."""
        return _copied(self.copy(table, run_id)) == _names_digest(files)

    def gather(self, run_id: str) -> None:
        """Copies a run's rows into one file per table: thousands of small files take long to read.

        Adds nothing to what is recorded. A copy that has all of it stays, also one of whose files
        none was kept.
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
        """A copy of these files, whose rows are `parts`."""
        metadata = {VERSION_KEY: str(VERSION), _COPIED: _names_digest(files)}
        schema = nullable(table).with_metadata(metadata)
        return write_file(self.copy(table, run_id), schema, parts)

    def unpack(self, run_id: str) -> None:
        """Makes single files of a run's copy, of which alone was kept: beside single files of later
        trials it would not count."""
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
        """Whether of a run's trials nothing but the copy was kept."""
        return self.copy("trials", run_id).exists() and not self.single("trials", run_id)

    def single(self, table: str, run_id: str) -> list[Path]:
        """The files of the trials that count; none where only the copy was kept."""
        counted = sorted((self.folder / "trials" / run_id).glob("*.parquet"))
        if table == "trials":
            return counted
        files = [self.folder / table / run_id / trial.name for trial in counted]
        return [file for file in files if file.exists()]


def _names_digest(files: Sequence[Path]) -> str:
    """Of the names of these files, which are never written anew."""
    names = "\n".join(sorted(file.name for file in files))
    return f"{len(files)} {hashlib.blake2s(names.encode(), digest_size=8).hexdigest()}"


def _copied(copy: Path) -> str | None:
    """What a copy says of the files that it was made of; None where there is none, or it is
    damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return str((pq.read_schema(copy).metadata or {})[_COPIED.encode()], "ascii")
    except (OSError, pa.ArrowException, KeyError, ValueError):
        return None
