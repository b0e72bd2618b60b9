"""Cells without a rank: launched ones, and planned ones that were not reached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.analysis.cell_result import CellResult
from harness.record.run import RunRecord
from harness.record.status import NO_RESULT
from harness.record.trial import TrialRecord
from harness.spec.cell import Cell
from reports.facts import plan_of
from reports.names import STATUS
from reports.text import plural


@dataclass(frozen=True)
class Failure:
    row: CellResult
    what: str
    trials: str
    log: str
    stacks: str


def failures(cells: Iterable[CellResult], trials: Sequence[TrialRecord]) -> list[Failure]:
    """Returns launched cells that failed, diverged or were interrupted; those that the matrix
    expects come last."""
    found = [_failure(cell, trials) for cell in cells if cell.status in NO_RESULT]
    return sorted(found, key=lambda f: (f.row.expected, NO_RESULT.index(f.row.status)))


def _failure(cell: CellResult, trials: Sequence[TrialRecord]) -> Failure:
    own = [trial for trial in trials if trial.cell_id == cell.cell_id]
    bad = [trial for trial in own if trial.status == cell.status]
    last = max(bad, key=lambda trial: (trial.trial, trial.attempt))
    count = f"{len(bad)} of {plural(len(own), 'trial')}"
    return Failure(cell, STATUS[cell.status], count, last.log_tail, last.stacks)


def unreached(run: RunRecord, cells: Iterable[CellResult]) -> list[Cell]:
    """Returns planned cells without a record."""
    recorded = {cell.cell_id for cell in cells}
    planned = []
    for fields in plan_of(run).get("cells", []):
        try:
            planned.append(Cell(**fields))
        except (TypeError, ValueError):
            continue  # Written by a version whose cells had other fields.
    return [cell for cell in planned if cell.id not in recorded]
