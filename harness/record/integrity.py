"""Checks checksums, schemas and names of the files in a results folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.record.files import DamagedFile, OtherSchema, parquet_schema, read_file
from harness.record.schema import TABLES
from harness.record.store import Store, TrialKey

QUARANTINE = "quarantine"
GATHERED = "gathered"
_JSON_NAMES: dict[type[object], str] = {dict: "object", list: "array"}


@dataclass(frozen=True)
class Problem:
    file: Path
    what: str
    damaged: bool = True
    """False if the file is intact, but has another schema or inconsistent values."""
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
