"""The parquet schema: five tables, one row per run, trial, step of a rank, profile of a cell, and
end of a run.

Each column names the version that added it. Contents of the versions:
  1  first version.
  2  systems, wrappers around DDP, trained parameters, states between steps with their formula,
     bytes sent and offloaded, distance to fp32.
  3  table explained; idle time around a trial, foreign load, energy.
  4  several nodes: number, names, facts, and the job of a run.
  5  emulated links between nodes: requested, measured, and how.
  6  interleaved trials: start and throughput of each time slice.
  7  context of GPU figures: versions, topology and settings; GPU state around each trial,
     throttling, NVML and host memory; cores of each rank; noise of the reference.
  8  the control between steps, and work that a step leaves behind.
  9  recomputation of blocks and its operations; table conclusions.
  10 sequence parallelism; compiled blocks and compile time; tokens per expert and their imbalance.
  11 states rewound to an earlier step and verified again.
  12 measured rates of a run's GPU, a trial's share of its matrix products; breakdown of GPU time.
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
"""Current schema version."""

VERSION_KEY = "parallelism_bench_schema_version"
"""Metadata key for the schema version of a file."""


@functools.cache
def arrow_schema(table: str) -> pa.Schema:
    return arrow_schema_of(TABLES[table]).with_metadata({VERSION_KEY: str(VERSION)})
