"""Offline W&B runs in FOLDER/wandb, one for each cell of each run; `wandb sync` uploads them."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from harness.record.trial import TrialRecord
from reports.export_records import records
from reports.publish.published import (
    AXES,
    TRIAL_FIGURES,
    CellRecord,
    Published,
    figures,
    loss_curve,
    quiet,
    tags_of,
)
from reports.run_report import RunReport, each
from reports.text import printable

if TYPE_CHECKING:
    from harness.record.store import Results

PROJECT = "parallelism-bench"
FOLDER = "wandb"
"""Folder that the client makes."""
DATED = "offline-run-????????_??????-"
"""Pattern of the date and time before a run's id."""
MOST_GROUP = 64


def write(results: Results, folder: Path) -> Published:
    """Writes each cell's run atomically; existing runs stay unchanged."""
    cells = already = 0
    runs = folder / FOLDER
    runs.mkdir(exist_ok=True)
    with quiet():
        import wandb

        try:
            for report in each(results):
                for record in records(report):
                    name = f"{report.run_id}-{record['cell_id']}"
                    if any(runs.glob(f"{DATED}{name}")):
                        already += 1
                        continue
                    with tempfile.TemporaryDirectory(dir=folder, prefix=".wandb-") as temporary:
                        _cell(report, record, name, Path(temporary))
                        (made,) = Path(temporary, FOLDER).glob(f"{DATED}{name}")
                        shutil.rmtree(made / "logs", ignore_errors=True)
                        made.rename(runs / made.name)
                    cells += 1
        finally:
            wandb.teardown()
    return Published(runs, cells, already)


def _cell(report: RunReport, record: CellRecord, name: str, folder: Path) -> None:
    import wandb

    axes = {key: record[key] for key in AXES}
    tags = tags_of(report, record)
    run = wandb.init(
        project=PROJECT,
        id=name,
        name=printable(record["cell_name"]) or record["cell_id"],
        group=report.run_id[:MOST_GROUP],
        config={key: _plain(value) for key, value in {**axes, **tags}.items()},
        dir=folder,
        reinit="create_new",
        settings=wandb.Settings(
            mode="offline",
            silent=True,
            console="off",
            disable_code=True,
            disable_git=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
            x_start_time=report.run.started_at.timestamp(),
        ),
    )
    run.define_metric("trials/*", step_metric="trial")
    run.define_metric("loss", step_metric="step")
    for trial in TrialRecord.from_frame(report.results.trials):
        if trial.cell_id == record["cell_id"]:
            row = {f"trials/{key}": getattr(trial, key) for key in TRIAL_FIGURES}
            known = {key: float(value) for key, value in row.items() if value is not None}
            if known:
                run.log({"trial": trial.trial, **known})
    for step, loss in enumerate(loss_curve(record)):
        if loss is not None:
            run.log({"step": step, "loss": loss})
    for key, value in figures(record).items():
        run.summary[key] = value
    run.finish(exit_code=0 if record["status"] == "ok" else 1)


def _plain(value: object) -> object:
    return printable(value) if isinstance(value, str) else value
