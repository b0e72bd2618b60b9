"""The parquet schema: five tables, one row per run, trial, step of a rank, profile of a cell, and
end of a run."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from harness.record.profile_record import ProfileRecord
from harness.record.run_record import ConclusionRecord, RunRecord, StepRecord
from harness.record.table import Record, arrow_schema_of
from harness.record.trial import TrialRecord

if TYPE_CHECKING:
    import pyarrow as pa

TABLES: dict[str, type[Record]] = {
    "runs": RunRecord,
    "trials": TrialRecord,
    "steps": StepRecord,
    "explained": ProfileRecord,
    "conclusions": ConclusionRecord,
}
VERSION = 12
"""Schema version: raise it when a column is added, changed or removed."""

VERSION_KEY = "parallelism_bench_schema_version"
"""Metadata key for the schema version of a file."""


@functools.cache
def arrow_schema(table: str) -> pa.Schema:
    return arrow_schema_of(TABLES[table]).with_metadata({VERSION_KEY: str(VERSION)})
