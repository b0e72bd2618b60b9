"""Writes tests/golden/vN for the present schema version N from the files of the version before.

`.venv/bin/python -m scripts.golden COLUMN=VALUE ...`: what trials that ended well have in the new
columns of table `trials`, as JSON. Elsewhere a new column has its default.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from harness.record.schema import TABLES, VERSION, arrow_schema

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"


def write(new_values: dict[str, object]) -> Path:
    """Returns the folder written; raises FileExistsError where this version has its files."""
    before, folder = GOLDEN / f"v{VERSION - 1}", GOLDEN / f"v{VERSION}"
    folder.mkdir()
    for file in sorted(before.rglob("*.parquet")):
        place = file.relative_to(before)
        schema = arrow_schema(place.parts[0])
        columns = TABLES[place.parts[0]].columns()
        empty = {c.name: None if c.default is dataclasses.MISSING else c.default for c in columns}
        rows = []
        for row in pq.read_table(file, partitioning=None).to_pylist():
            ended_well = place.parts[0] == "trials" and row["status"] == "ok"
            more = new_values if ended_well else {}
            rows.append({**empty, **row, **more, "schema_version": VERSION})
        for row in rows:
            for name in row.keys() - set(schema.names):
                del row[name]
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / place)
    return folder


if __name__ == "__main__":
    pairs = (word.split("=", 1) for word in sys.argv[1:])
    print(write({name: json.loads(value) for name, value in pairs}))
