"""TensorBoard event files: FOLDER/RUN/CELL, a curve of step times and losses per trial, a point per
trial, and hyperparameters."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reports.export_records import known, records
from reports.publish.published import AXES, Published, figures, loss_curve
from reports.run_report import RunReport, each

if TYPE_CHECKING:
    import pandas as pd

    from harness.record.store import Results


def write(results: Results, folder: Path) -> Published:
    """A folder for each run, whole or absent; a run that is there already is left as it is."""
    cells = already = 0
    for one in each(results):
        target = folder / one.run_id
        found = records(one)
        if target.exists():
            already += len(found)
            continue
        temporary = folder / f".{one.run_id}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        for record in found:
            _cell(one, record, temporary / cell_folder(record))
        temporary.mkdir(exist_ok=True)
        temporary.rename(target)
        cells += len(found)
    return Published(folder, cells, already)


def cell_folder(record: dict[str, Any]) -> str:
    """What TensorBoard shows as the cell's name: letters that any file system takes, and the cell's
    id."""
    slug = re.sub(r"[^A-Za-z0-9._=-]+", "-", record["cell_name"]).strip("-.")[:80]
    return f"{slug or 'cell'}-{record['cell_id']}"


def _cell(one: RunReport, record: dict[str, Any], folder: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    own = one.results.trials[
        (one.results.trials["cell_id"] == record["cell_id"])
        & (one.results.trials["status"] == "ok")
    ]
    began = one.run["started_at"].timestamp()
    writer: Any = SummaryWriter(str(folder))
    try:
        for trial in own.to_dict("records"):
            at = trial["started_at"].timestamp()
            for name in ("samples_per_second", "step_seconds_p50", "peak_memory_bytes"):
                if (value := known(trial[name])) is not None:
                    writer.add_scalar(f"trials/{name}", value, trial["trial"], walltime=at)
            for step, seconds in _slowest(one.results.steps, trial).items():
                writer.add_scalar(
                    f"step_seconds/trial_{trial['trial']}", seconds, step, walltime=at
                )
        for step, loss in enumerate(loss_curve(record)):
            if loss is not None:
                writer.add_scalar("loss", loss, step, walltime=began)
        writer.add_text(
            "status",
            f"{record['status']}: {record['reason']}" if record["reason"] else record["status"],
            walltime=began,
        )
        axes = {name: record[name] for name in AXES}
        told = {f"cell/{name}": value for name, value in figures(record).items()}
        writer.add_hparams(axes, told, run_name=".", global_step=0)
    finally:
        writer.close()


def _slowest(steps: pd.DataFrame, trial: Any) -> dict[int, float]:
    """Seconds of each step of a trial, its slowest rank's."""
    mine = steps[
        (steps["cell_id"] == trial["cell_id"])
        & (steps["trial"] == trial["trial"])
        & (steps["attempt"] == trial["attempt"])
    ]
    return {
        int(step): float(value)
        for step, value in mine.groupby("step")["step_seconds"].max().items()
    }
