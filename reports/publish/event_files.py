"""TensorBoard event files in FOLDER/RUN/CELL: steps, losses, trials and hyperparameters."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.record.trial import TrialRecord
from reports.export_records import records
from reports.publish.published import (
    AXES,
    TRIAL_FIGURES,
    CellRecord,
    Published,
    figures,
    loss_curve,
)
from reports.run_report import RunReport, each

if TYPE_CHECKING:
    import pandas as pd

    from harness.record.store import Results


def write(results: Results, folder: Path) -> Published:
    """Writes each cell's folder atomically; existing cells stay unchanged."""
    cells = already = 0
    for report in each(results):
        run = folder / report.run_id
        run.mkdir(exist_ok=True)
        temporary = folder / f".{report.run_id}.tmp"
        for record in records(report):
            target = run / cell_folder(record)
            if target.exists():
                already += 1
                continue
            shutil.rmtree(temporary, ignore_errors=True)
            _cell(report, record, temporary)
            temporary.rename(target)
            cells += 1
    return Published(folder, cells, already)


def cell_folder(record: CellRecord) -> str:
    slug = re.sub(r"[^A-Za-z0-9._=-]+", "-", record["cell_name"]).strip("-.")[:80]
    return f"{slug or 'cell'}-{record['cell_id']}"


def _cell(report: RunReport, record: CellRecord, folder: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    trials = TrialRecord.from_frame(report.results.trials)
    own = [t for t in trials if t.cell_id == record["cell_id"] and t.status == "ok"]
    began = report.run.started_at.timestamp()
    writer: Any = SummaryWriter(str(folder))
    try:
        for trial in own:
            at = trial.started_at.timestamp()
            for name in TRIAL_FIGURES:
                if (value := getattr(trial, name)) is not None:
                    writer.add_scalar(f"trials/{name}", value, trial.trial, walltime=at)
            for step, seconds in _slowest(report.results.steps, trial).items():
                writer.add_scalar(f"step_seconds/trial_{trial.trial}", seconds, step, walltime=at)
        for step, loss in enumerate(loss_curve(record)):
            if loss is not None:
                writer.add_scalar("loss", loss, step, walltime=began)
        writer.add_text(
            "status",
            f"{record['status']}: {record['reason']}" if record["reason"] else record["status"],
            walltime=began,
        )
        axes = {name: record[name] for name in AXES}
        shown = {f"cell/{name}": value for name, value in figures(record).items()}
        writer.add_hparams(axes, shown, run_name=".", global_step=0)
    finally:
        writer.close()


def _slowest(steps: pd.DataFrame, trial: TrialRecord) -> dict[int, float]:
    mine = steps[
        (steps["cell_id"] == trial.cell_id)
        & (steps["trial"] == trial.trial)
        & (steps["attempt"] == trial.attempt)
    ]
    slowest = mine.groupby("step")["step_seconds"].max()
    return dict(zip(slowest.index.tolist(), slowest.tolist(), strict=True))
