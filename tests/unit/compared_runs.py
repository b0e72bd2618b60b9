"""Handmade runs and their comparison."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import pandas as pd

from harness.analysis.compare import ComparedCell, RunComparison, compare_sides
from harness.analysis.selection import select
from harness.cell.cell import Cell
from harness.record.run_record import RunRecord
from harness.record.store import Results
from harness.record.trial import TrialRecord
from tests.unit.made_results import run_row

CELL = Cell(strategy="ddp", devices=2)
OTHER = Cell(strategy="fsdp2", devices=2)
OLD, NEW = "20260101T000000-aaaa", "20260102T000000-bbbb"


def frames(rows: Sequence[dict[str, Any]], run_id: str = OLD, **changes: Any) -> Results:
    """Returns the frames of one run, as the store does."""
    run = run_row(run_id=run_id, started_at=datetime(2026, 1, 1, tzinfo=timezone.utc), **changes)
    tables = []
    trials = [row | {"run_id": run_id} for row in rows]
    for table, found in ((RunRecord, [run]), (TrialRecord, trials)):
        names = [column.name for column in table.columns()]
        tables.append(
            pd.DataFrame([{name: row.get(name) for name in names} for row in found], columns=names)
        )
    return Results(*tables, pd.DataFrame())


def together(*results: Results) -> Results:
    runs, trials = (
        pd.concat([getattr(one, name) for one in results], ignore_index=True)
        for name in ("runs", "trials")
    )
    return Results(runs, trials, pd.DataFrame())


def compared(
    was: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]], **changes: Any
) -> RunComparison:
    """Compares `was` with `now`. `changes`: to the run row of `now`."""
    return compare_sides(select("old", frames(was)), select("new", frames(now, NEW, **changes)))


def only(
    was: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]], **changes: Any
) -> ComparedCell:
    (line,) = compared(was, now, **changes).lines
    return line
