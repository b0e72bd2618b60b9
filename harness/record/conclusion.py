"""The table `conclusions`: what a run came to, one row for each time that it ended."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from harness.record.table import Int32, Record


@dataclass(frozen=True, kw_only=True)
class ConclusionRecord(Record):
    """How well a run knows its throughputs, and what it advises. Since schema version 9; it can be
    computed anew from the trials."""

    schema_version: Int32
    """version of this schema"""
    run_id: str
    concluded_at: datetime
    """UTC"""
    wall_seconds: float
    """from the start of the command to its last trial; of a resumed run of the last command"""
    trials: Int32
    """recorded so far"""
    compared_cells: Int32 = 0
    """verified cells with a core for each rank and a baseline in their setting"""
    half_width_median: float | None = None
    """of the 95 % intervals of their throughputs over the baseline's, as fractions of these; null
    without any, as the next"""
    half_width_nine_in_ten: float | None = None
    """nine of ten cells have at most this"""
    advised_cell_id: str | None = None
    """the strategy to use; null where none can be advised"""
    advice: str | None = None
    """that in a sentence"""
