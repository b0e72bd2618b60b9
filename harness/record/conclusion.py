"""The table `conclusions`: what a run concluded, one row each time it ended."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from harness.record.table import Int32, Record


@dataclass(frozen=True, kw_only=True)
class ConclusionRecord(Record):
    """Precision of a run's throughputs, and its advice; can be recomputed from the trials."""

    schema_version: Int32
    """version of this schema"""
    run_id: str
    concluded_at: datetime
    """UTC"""
    wall_seconds: float
    """from the start of the command to its last trial; for a resumed run, of the last command"""
    trials: Int32
    """number of trials recorded so far"""
    compared_cells: Int32 = 0
    """number of verified cells with a core per rank and a baseline in their setting"""
    half_width_median: float | None = None
    """median half width of the 95 % intervals of throughput over the baseline's, as a fraction;
    null without intervals"""
    half_width_nine_in_ten: float | None = None
    """90th percentile of these half widths"""
    advised_cell_id: str | None = None
    """the strategy to use; null if none can be advised"""
    advice: str | None = None
    """the advice as a sentence"""
