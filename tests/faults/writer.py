"""`python -m tests.faults.writer FOLDER RUN TRIALS` writes a run as fast as it can, into a results
folder to which others write at the same time."""

from __future__ import annotations

import sys
from datetime import datetime, timezone

from harness.cell.cell import Cell
from harness.record.files import VERSION
from harness.record.run_record import ConclusionRecord, RunRecord
from harness.record.store import Store, TrialKey
from harness.record.trial import TrialRecord
from tests.unit.stored_trials import one_cell_run, step, trial_row

STEPS = 3
SHARED = "shared"
"""Run that all writers begin and conclude."""
GATHERS_EVERY = 20
"""Trials between copies of the run, which commands make when they end."""


def conclusion(run_id: str) -> ConclusionRecord:
    now = datetime.now(timezone.utc)
    return ConclusionRecord(
        schema_version=VERSION, run_id=run_id, concluded_at=now, wall_seconds=1.0, trials=1
    )


def write(store: Store, run_id: str, trials: int) -> None:
    store.write_run(RunRecord(**one_cell_run(SHARED)))
    assert store.write_run(RunRecord(**one_cell_run(run_id)))
    cell = Cell(strategy="ddp", devices=2)
    for number in range(trials):
        key = TrialKey(cell.id, number)
        steps = [step(key, place, run_id=run_id) for place in range(STEPS)]
        store.write_trial(TrialRecord(**trial_row(cell, number, run_id)), steps)
        if number % GATHERS_EVERY == GATHERS_EVERY - 1:
            store.gather(run_id)
            store.write_conclusion(conclusion(run_id))
            store.write_conclusion(conclusion(SHARED))


if __name__ == "__main__":
    write(Store(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
