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
VERSION = 14
"""Increase it when a column is added, changed or removed."""

VERSION_KEY = "parallelism_bench_schema_version"


@functools.cache
def arrow_schema(table: str) -> pa.Schema:
    return arrow_schema_of(TABLES[table]).with_metadata({VERSION_KEY: str(VERSION)})
