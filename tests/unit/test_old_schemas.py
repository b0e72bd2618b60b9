"""Runs of older schemas are checked, reported, compared, listed and guarded like new ones.

One run of each schema is kept in tests/golden/schemas. If you raise VERSION, keep another with
`--update`.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from bench.cluster import night as nightly
from bench.cluster.night import Nights
from harness.analysis import consistency
from harness.analysis.compare import compare_sides
from harness.analysis.history import histories
from harness.analysis.selection import measured, select
from harness.cell.cell import Cell
from harness.record.files import VERSION
from harness.record.plan import kept_plan
from harness.record.run_record import RunRecord
from harness.record.store import Store
from harness.record.trial import TrialRecord
from reports import report_text, site

KEPT = Path(__file__).parents[1] / "golden" / "schemas"
MATRIX = """
trials: 2
timed_seconds: 0
defaults: {workload: llama-nano, sequence_length: 32, batch: 8, warmup_steps: 1, timed_steps: 4}
cells:
  - {strategy: single}
  - {strategy: [ddp, fsdp2], devices: 2}
"""


def test_a_run_of_the_current_schema_is_kept(update: bool, tmp_path: Path) -> None:
    folder = KEPT / f"v{VERSION}"
    if update and not folder.exists():
        from bench.api import run

        file = tmp_path / "tiny.yaml"
        file.write_text(MATRIX)
        run(matrix=str(file), results=tmp_path / "results")
        for table in ("runs", "gathered", "conclusions"):
            shutil.copytree(tmp_path / "results" / table, folder / table)
        for lock in folder.rglob(".*"):
            lock.unlink()
    assert folder.exists(), "keep a run of this schema: run this test with --update"


@pytest.mark.parametrize("version", sorted(path.name for path in KEPT.iterdir()))
def test_every_command_reads_runs_of_every_schema(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nightly, "states", lambda job: [])
    shutil.copytree(KEPT / version, tmp_path / "results")
    store = Store(tmp_path / "results")
    assert consistency.check(store.folder).problems == ()
    (old,) = store.run_ids()
    assert kept_plan(store, old).cells
    results = store.load()
    cells = measured(results)
    assert [cell for cell in cells if cell.ok]
    assert cells[-1].label in report_text(results, "md").text
    assert histories(cells, "throughput")
    assert old in site.page(site.entries(store, tmp_path), tmp_path)
    # A night recorded by this version in the same folder.
    (run,) = RunRecord.from_frame(results.runs)
    store.write_run(dataclasses.replace(run, run_id="tonight", schema_version=VERSION))
    for trial in TrialRecord.from_frame(results.trials):
        cell = Cell.model_validate_json(trial.cell)
        fields = {"run_id": "tonight", "schema_version": VERSION, "cell_id": cell.id}
        store.write_trial(dataclasses.replace(trial, **fields))
    compared = compare_sides(*(select(one, store.load([one])) for one in (old, "tonight")))
    assert compared.comparisons > 0
    assert not compared.regressions
    nights = Nights(store.folder, run.matrix)
    nights.accept(old)
    assert nights.end("tonight", "1", 0).name == "ok"
    assert nights.good() == [old, "tonight"]
