"""Serverless MLflow file store: an MLflow run for each cell of each run."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.record.trial import TrialRecord
from reports.export_records import records
from reports.publish.published import (
    AXES,
    CELL_TAG,
    RUN_TAG,
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

EXPERIMENT = "parallelism-bench"
MOST_PARAM, MOST_TAG = 500, 5000
"""Most characters that every MLflow version accepts."""


def write(results: Results, folder: Path) -> Published:
    """Writes the cells; those already complete stay unchanged."""
    with quiet():
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=folder.resolve().as_uri())
        kept = client.get_experiment_by_name(EXPERIMENT)
        experiment = kept.experiment_id if kept else client.create_experiment(EXPERIMENT)
        there = _there(client, experiment)
        cells = already = 0
        for report in each(results):
            for record in records(report):
                if (report.run_id, record["cell_id"]) in there:
                    already += 1
                else:
                    _cell(client, experiment, report, record)
                    cells += 1
    return Published(folder, cells, already)


def _there(client: Any, experiment: str) -> set[tuple[str, str]]:
    there: set[tuple[str, str]] = set()
    token = None
    while True:
        page = client.search_runs([experiment], max_results=1000, page_token=token)
        tags = [run.data.tags for run in page if run.info.status in ("FINISHED", "FAILED")]
        there |= {(t[RUN_TAG], t[CELL_TAG]) for t in tags if RUN_TAG in t and CELL_TAG in t}
        token = page.token
        if not token:
            return there


def _cell(client: Any, experiment: str, report: RunReport, record: CellRecord) -> None:
    from mlflow.entities import Metric, Param, RunTag

    trials = TrialRecord.from_frame(report.results.trials)
    own = [trial for trial in trials if trial.cell_id == record["cell_id"]]
    began = _milliseconds(own[0].started_at)
    name = printable(record["cell_name"])[:MOST_PARAM] or record["cell_id"]
    run = client.create_run(experiment, start_time=began, run_name=name)
    metrics = [Metric(key, value, began, 0) for key, value in figures(record).items()]
    for trial in own:
        at = _milliseconds(trial.started_at)
        values = {key: value for key in TRIAL_FIGURES if (value := getattr(trial, key)) is not None}
        metrics += [
            Metric(f"trial_{key}", float(value), at, trial.trial) for key, value in values.items()
        ]
    metrics += [
        Metric("loss", loss, began, step)
        for step, loss in enumerate(loss_curve(record))
        if loss is not None
    ]
    params = [Param(key, _text(record[key], MOST_PARAM)) for key in AXES]
    client.log_batch(
        run.info.run_id,
        params=params,
        tags=[
            RunTag(key, _text(value, MOST_TAG)) for key, value in tags_of(report, record).items()
        ],
    )
    for begin in range(0, len(metrics), 1000):  # MLflow's limit per batch.
        client.log_batch(run.info.run_id, metrics=metrics[begin : begin + 1000])
    ended = max(
        _milliseconds(trial.started_at) + int(1000 * (trial.wall_seconds or 0)) for trial in own
    )
    client.set_terminated(
        run.info.run_id, "FINISHED" if record["status"] == "ok" else "FAILED", end_time=ended
    )


def _milliseconds(time: datetime) -> int:
    return int(time.timestamp() * 1000)


def _text(value: object, most: int) -> str:
    return " ".join(printable(str(value)).split())[:most]
