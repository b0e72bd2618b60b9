"""The parquet schema: five tables, one row per run, per trial, per step of a rank, per launch that
explains a cell, per end of a run.

A column says since which version the schema has it. What the first versions were made for:
  1  first version.
  2  systems, wrappers around DDP, trained parameters, states between steps with their formula,
     bytes sent and offloaded, distance to fp32.
  3  table explained; idle time around a trial, foreign load, energy.
  4  several nodes: their number, names and facts, and the job that a run was part of.
  5  emulated links between nodes: as asked for, as measured, and how.
  6  launches that train by turns: when each turn began, and its throughput.
  7  what a GPU's number needs beside it: versions, topology and settings of a run's GPUs; their
     state around each trial, what held them back in the timed steps, memory by NVML and of the
     host; cores of each rank; noise of the reference.
  8  the control that runs between the steps, and work that a step leaves behind.
  9  recomputation of blocks, and the operations that it adds; table conclusions.
  10 ranks that share sequences; compiled blocks, and how long compiling took; tokens that each
     expert of a mixture gets, and their imbalance.
  11 states set back to an earlier step and judged again.
  12 measured rates of a run's GPU, and a trial's share of its matrix products; where a GPU's time
     goes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from harness.record.conclusion import ConclusionRecord
from harness.record.profile import ProfileRecord
from harness.record.run import RunRecord
from harness.record.step import StepRecord
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
VERSION = max(column.since for table in TABLES.values() for column in table.columns())
"""The version of a file whose tables have all columns of today."""

VERSION_KEY = "parallelism_bench_schema_version"
"""Where a file's metadata says which version of the schema it has."""


@functools.cache
def arrow_schema(table: str) -> pa.Schema:
    """The table's arrow schema, the version in its metadata."""
    return arrow_schema_of(TABLES[table]).with_metadata({VERSION_KEY: str(VERSION)})
