"""Checks checksums, schemas and names of the files in a results folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.record.files import DamagedFile, OtherSchema, read_file
from harness.record.schema import TABLES
from harness.record.store import Store, TrialKey

QUARANTINE = "quarantine"


@dataclass(frozen=True)
class Problem:
    """A file that readers skip or reject."""

    file: Path
    what: str
    damaged: bool = True
    """False if the file has another schema version."""


@dataclass(frozen=True)
class Checked:
    files: int
    problems: tuple[Problem, ...]


def check_folder(store: Store) -> Checked:
    problems, count = [], 0
    for table, file in _files(store.folder):
        count += 1
        try:
            _check(table, file)
        except DamagedFile as problem:
            problems.append(Problem(file.relative_to(store.folder), str(problem)))
        except OtherSchema as other:
            problems.append(Problem(file.relative_to(store.folder), str(other), damaged=False))
    return Checked(count, tuple(problems))


def quarantine(store: Store, problem: Problem) -> Path:
    """Moves a file to the quarantine folder; returns its new path. Never overwrites."""
    target = store.folder / QUARANTINE / problem.file
    number = 0
    while target.exists():
        number += 1
        target = target.with_name(f"{problem.file.name}.{number}")
    target.parent.mkdir(parents=True, exist_ok=True)
    (store.folder / problem.file).rename(target)
    return target


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    yield from (("runs", file) for file in sorted((folder / "runs").glob("*.parquet")))
    for table in TABLES.keys() - {"runs"}:
        yield from ((table, file) for file in sorted((folder / table).glob("*/*.parquet")))
        yield from ((table, file) for file in sorted(folder.glob(f"gathered/*/{table}.parquet")))


def _check(table: str, file: Path) -> None:
    rows = read_file(table, file)
    for column in TABLES[table].columns():
        if not column.nullable and rows.column(column.name).null_count:
            raise DamagedFile(f"column {column.name} contains a null, which is not allowed")
    runs = {file.stem if table == "runs" else file.parent.name}
    if len(rows) and set(rows.column("run_id").to_pylist()) != runs:
        raise DamagedFile(f"it has rows of a run other than {', '.join(runs)}")
    if file.parents[1].name == "gathered":
        return
    if not len(rows):
        raise DamagedFile("it has no rows")
    if table == "runs":
        _check_plan(rows.column("plan")[0].as_py())
    elif table in ("trials", "steps"):
        columns = (rows.column(name).to_pylist() for name in ("cell_id", "trial", "attempt"))
        if {TrialKey(*key).stem for key in zip(*columns, strict=True)} != {file.stem}:
            raise DamagedFile("its rows belong to another trial than its name says")


def _check_plan(text: str) -> None:
    try:
        json.loads(text)
    except ValueError as error:
        raise DamagedFile(f"column plan is not JSON: {error}") from None
