"""The code in docs/python.md runs unchanged and in order, and prints what the store has."""

from __future__ import annotations

import contextlib
import io
import re
import statistics
import warnings
from pathlib import Path
from typing import Any

import pytest

from harness.cell.cell import Cell
from harness.record.run_record import RunRecord, StepRecord
from harness.record.store import Store
from harness.record.trial import TrialRecord
from tests.unit.made_results import left_out, run_row, trial_rows

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
DDP, FSDP = (Cell(strategy=name, devices=2) for name in ("ddp", "fsdp2"))
ABSENT = "package absent is not installed"
SPEEDS = [(DDP, [100.0, 104.0, 96.0]), (FSDP, [50.0, 52.5, 47.5])]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs of two strategies, with an unavailable cell and the steps of each trial."""
    store = Store(tmp_path / "results")
    for run_id in ("20260101T000000-aaaa", "20260102T000000-bbbb"):
        store.write_run(RunRecord(**run_row(run_id=run_id)))
        for cell, speeds in SPEEDS:
            for row in trial_rows(cell, speeds, run_id=run_id):
                key = {"run_id": run_id, "cell_id": cell.id, "trial": row["trial"], "attempt": 1}
                timed = {"phase": "timed", "data_seconds": 0.0, "step_seconds": 0.08}
                steps = [
                    StepRecord(**key, **timed, rank=rank, step=step)
                    for rank in range(2)
                    for step in range(3)
                ]
                store.write_trial(TrialRecord(**row), steps)
        (row,) = left_out(Cell(strategy="absent"), "unavailable", ABSENT)
        store.write_trial(TrialRecord(**(row | {"run_id": run_id})))
    return tmp_path


def test_every_block_runs_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 5
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MPLBACKEND", "agg")
    matplotlib.use("agg")
    names: dict[str, Any] = {}
    out = io.StringIO()
    with contextlib.redirect_stdout(out), warnings.catch_warnings():
        for number, block in enumerate(blocks):
            exec(compile(block, f"{PAGE.name}, block {number + 1}", "exec"), names)
    assert names["fast"]["label"].tolist() == ["ddp", "fsdp2"]
    means = [statistics.geometric_mean(speeds) for _, speeds in SPEEDS]
    assert names["comparison"].ratio == pytest.approx(means[0] / means[1])
    told = out.getvalue()
    assert f"ddp over fsdp2: {means[0] / means[1]:.3f}, " in told
    assert ABSENT in told
    assert (folder / "throughput.svg").read_text().count("<svg") == 1
