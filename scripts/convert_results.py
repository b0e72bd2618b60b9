"""Converts collected runs of an earlier schema version to the current one.

python -m scripts.convert_results FOLDER [OLD=NEW ...]

OLD=NEW renames a column, or a field of the plan. New columns are null or empty. Cell ids are
recomputed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from harness.record.files import RunFiles, write_file
from harness.record.schema import TABLES, VERSION, arrow_schema
from harness.record.store import TrialKey
from harness.spec.cell import Cell

Row = dict[str, Any]


def convert(folder: Path, renamed: Mapping[str, str]) -> None:
    for copies in sorted((folder / "gathered").iterdir()):
        run_id = copies.name
        trials, steps = (rows_of(copies / f"{table}.parquet") for table in ("trials", "steps"))
        ids = {row["cell_id"]: Cell(**json.loads(row["cell"])).id for row in trials}
        for table, rows in (("trials", trials), ("steps", steps)):
            converted = table_of(table, rows, renamed, ids)
            keys = zip(*(converted[name].to_pylist() for name in KEY), strict=True)
            files = [Path(f"{TrialKey(*key).stem}.parquet") for key in dict.fromkeys(keys)]
            RunFiles(folder).write_copy(table, run_id, files, [converted])
        for table, file in single_files(folder, run_id):
            converted = table_of(table, rows_of(file), renamed, ids)
            write_file(file, arrow_schema(table), [converted])


KEY = tuple(field.name for field in dataclasses.fields(TrialKey))


def single_files(folder: Path, run_id: str) -> Iterator[tuple[str, Path]]:
    yield "runs", folder / "runs" / f"{run_id}.parquet"
    yield from (("conclusions", file) for file in (folder / "conclusions" / run_id).glob("*"))


def rows_of(file: Path) -> list[Row]:
    rows: list[Row] = pq.read_table(file, partitioning=None).to_pylist()
    return rows


def table_of(
    table: str, rows: list[Row], renamed: Mapping[str, str], ids: Mapping[str, str]
) -> pa.Table:
    schema = arrow_schema(table)
    columns = TABLES[table].columns()
    empty = {c.name: None if c.default is dataclasses.MISSING else c.default for c in columns}
    converted = []
    for row in rows:
        new = {**empty, **{renamed.get(name, name): value for name, value in row.items()}}
        new["schema_version"] = VERSION
        for name in ("cell_id", "advised_cell_id"):
            new[name] = ids.get(new.get(name, ""), new.get(name))
        if table == "runs":
            plan = {renamed.get(k, k): value for k, value in json.loads(new["plan"]).items()}
            new["plan"] = json.dumps(plan)
            for old, now in ids.items():
                new["plan"] = new["plan"].replace(f'"{old}"', f'"{now}"')
        converted.append({name: new[name] for name in schema.names})
    return pa.Table.from_pylist(converted, schema=schema)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), dict(pair.split("=", 1) for pair in sys.argv[2:]))
