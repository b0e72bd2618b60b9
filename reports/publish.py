"""Publishes results to common tools through their own client libraries."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cell.errors import UsageError
from harness.host.packages import how_to_install
from harness.record.plan import matrix_name
from harness.record.trial import TrialRecord
from reports import run_facts
from reports.export_records import AXES, PUBLISHED, TRIAL_FIGURES, records
from reports.run_report import RunReport, ran, reports_of
from reports.text import printable

if TYPE_CHECKING:
    from harness.record.store import Results

LIBRARIES = {
    "mlflow": "mlflow",
    "wandb": "wandb",
    "prometheus": "prometheus_client",
}
"""Library of each target; the extra is named after the target."""
RUN_TAG, CELL_TAG = "bench.run_id", "bench.cell_id"
PROJECT = "parallelism-bench"
"""Name of MLflow's experiment and of the W&B project."""
PREFIX = "parallelism_bench_"
LABELS = (
    *("cell_id", "cell", "strategy", "workload", "devices", "precision", "global_batch", "regime"),
    *("matrix", "host"),
)
"""Labels of Prometheus's gauges."""
_MOST_PARAM, _MOST_TAG = 500, 5000
"""Maximum number of characters that every MLflow version accepts."""
_MOST_GROUP = 64
_DATED = "offline-run-????????_??????-"
"""Pattern of the date and time before the id of an offline W&B run."""

CellRecord = Mapping[str, Any]
_Write = Callable[[RunReport, CellRecord], bool]
"""Writes a cell's record; returns False if it is already there."""


@dataclass(frozen=True)
class Published:
    path: Path
    cells: int
    already: int
    """Number of cells that were there before and stay unchanged."""


def publish(target: str, results: Results, folder: Path) -> Published:
    """Writes runs to a folder in the target's format. Cells that are already there stay unchanged.

    Raises UsageError if the library is missing or the folder cannot be written.
    """
    need(target)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{str(folder)!r} is a file; name the folder that {target} is to read")
    if target == "prometheus" and len(results.runs) != 1:
        raise UsageError(
            f"a Prometheus textfile has the figures of one run, not of {len(results.runs)}: name"
            " one, by default the newest"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if target == "prometheus":
            return _prometheus(ran(results), folder)
        targets = {"mlflow": _mlflow, "wandb": _wandb}
        with quiet(), targets[target](folder) as write:
            done = [write(run, record) for run in reports_of(results) for record in records(run)]
    except OSError as error:
        raise UsageError(
            f"{str(folder)!r} cannot be written ({error.strerror}); name another folder"
        ) from None
    path = folder / "wandb" if target == "wandb" else folder
    return Published(path, sum(done), len(done) - sum(done))


def need(target: str) -> None:
    """Raises UsageError if the target's library is missing."""
    library = LIBRARIES[target]
    try:
        with quiet():
            importlib.import_module(library)
    except ImportError as error:
        raise UsageError(
            f"publishing for {target} needs the package {library}, which cannot be imported here"
            f" ({error}): {how_to_install(target)}"
        ) from None


@contextmanager
def quiet() -> Iterator[None]:
    """Allows MLflow's file store, which is opt-in since 3.0, and disables the telemetry of MLflow
    and W&B."""
    wanted = {
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "WANDB_ERROR_REPORTING": "false",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _tags(report: RunReport, record: CellRecord) -> dict[str, str]:
    return {
        RUN_TAG: report.run_id,
        CELL_TAG: record["cell_id"],
        "bench.status": record["status"],
        "bench.reason": record["reason"],
        "bench.parity": record["parity_verdict"] or "",
        "bench.matrix": report.run.matrix,
        "bench.hardware": run_facts.hardware(report.run),
        "bench.commit": report.run.git_commit or "",
    }


def _figures(record: CellRecord) -> dict[str, float]:
    return {name: float(record[name]) for name in PUBLISHED if record[name] is not None}


def _trials(report: RunReport, record: CellRecord) -> list[tuple[TrialRecord, dict[str, float]]]:
    """Returns the cell's trials and their finite figures."""
    return [
        (trial, {n: float(v) for n in TRIAL_FIGURES if (v := getattr(trial, n)) is not None})
        for trial in TrialRecord.from_frame(report.results.trials)
        if trial.cell_id == record["cell_id"]
    ]


def _losses(record: CellRecord) -> list[tuple[int, float]]:
    """Returns steps with their mean loss, from the trial that determined parity."""
    losses: Sequence[float | None] = record["losses"] or []
    return [(step, loss) for step, loss in enumerate(losses) if loss is not None]


@contextmanager
def _mlflow(folder: Path) -> Iterator[_Write]:
    """Writes to a serverless file store: an MLflow run for each cell of each run."""
    from mlflow.tracking import MlflowClient

    client: Any = MlflowClient(tracking_uri=folder.resolve().as_uri())
    found = client.get_experiment_by_name(PROJECT)
    experiment = found.experiment_id if found else client.create_experiment(PROJECT)
    complete: set[tuple[str, str]] = set()
    token = None
    while True:
        page = client.search_runs([experiment], max_results=1000, page_token=token)
        tags = [run.data.tags for run in page if run.info.status in ("FINISHED", "FAILED")]
        complete |= {(t[RUN_TAG], t[CELL_TAG]) for t in tags if RUN_TAG in t and CELL_TAG in t}
        token = page.token
        if not token:
            break

    def write(report: RunReport, record: CellRecord) -> bool:
        new = (report.run_id, record["cell_id"]) not in complete
        if new:
            _mlflow_run(client, experiment, report, record)
        return new

    yield write


def _mlflow_run(client: Any, experiment: str, report: RunReport, record: CellRecord) -> None:
    from mlflow.entities import Metric, Param, RunTag

    trials = _trials(report, record)
    began = _milliseconds(trials[0][0].started_at)
    name = printable(record["cell_name"])[:_MOST_PARAM] or record["cell_id"]
    run = client.create_run(experiment, start_time=began, run_name=name)
    metrics = [Metric(key, value, began, 0) for key, value in _figures(record).items()]
    for trial, values in trials:
        at = _milliseconds(trial.started_at)
        metrics += [Metric(f"trial_{key}", v, at, trial.trial) for key, v in values.items()]
    metrics += [Metric("loss", loss, began, step) for step, loss in _losses(record)]
    tags = _tags(report, record)
    client.log_batch(
        run.info.run_id,
        params=[Param(key, _one_line(record[key], _MOST_PARAM)) for key in AXES],
        tags=[RunTag(key, _one_line(value, _MOST_TAG)) for key, value in tags.items()],
    )
    for begin in range(0, len(metrics), 1000):  # MLflow takes no more metrics in a batch.
        client.log_batch(run.info.run_id, metrics=metrics[begin : begin + 1000])
    ends = [_milliseconds(t.started_at) + int(1000 * (t.wall_seconds or 0)) for t, _ in trials]
    status = "FINISHED" if record["status"] == "ok" else "FAILED"
    client.set_terminated(run.info.run_id, status, end_time=max(ends))


def _milliseconds(time: datetime) -> int:
    return int(time.timestamp() * 1000)


def _one_line(value: object, most: int) -> str:
    return " ".join(printable(str(value)).split())[:most]


@contextmanager
def _wandb(folder: Path) -> Iterator[_Write]:
    """Writes offline runs to FOLDER/wandb, each atomically; `wandb sync` uploads them."""
    import wandb

    runs = folder / "wandb"  # The client gives the folder this name.
    runs.mkdir(exist_ok=True)

    def write(report: RunReport, record: CellRecord) -> bool:
        name = f"{report.run_id}-{record['cell_id']}"
        if any(runs.glob(f"{_DATED}{name}")):
            return False
        with tempfile.TemporaryDirectory(dir=folder, prefix=".wandb-") as temporary:
            _wandb_run(report, record, name, Path(temporary))
            (made,) = Path(temporary, "wandb").glob(f"{_DATED}{name}")
            shutil.rmtree(made / "logs", ignore_errors=True)
            made.rename(runs / made.name)
        return True

    try:
        yield write
    finally:
        wandb.teardown()


def _wandb_run(report: RunReport, record: CellRecord, name: str, folder: Path) -> None:
    import wandb

    config = {key: record[key] for key in AXES} | _tags(report, record)
    run = wandb.init(
        project=PROJECT,
        id=name,
        name=printable(record["cell_name"]) or record["cell_id"],
        group=report.run_id[:_MOST_GROUP],
        config={k: printable(v) if isinstance(v, str) else v for k, v in config.items()},
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
    for trial, values in _trials(report, record):
        if values:
            run.log({"trial": trial.trial, **{f"trials/{k}": v for k, v in values.items()}})
    for step, loss in _losses(record):
        run.log({"step": step, "loss": loss})
    run.summary.update(_figures(record))
    run.finish(exit_code=0 if record["status"] == "ok" else 1)


def _prometheus(report: RunReport, folder: Path) -> Published:
    """Replaces the textfile for the node exporter atomically: gauges with units in their names."""
    from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

    registry = CollectorRegistry()
    host = {"matrix": report.run.matrix, "host": report.run.host}
    started = report.run.started_at.timestamp()
    failures = "Launched cells without a valid result, unless the matrix expects it."
    for name, meaning, value in (
        ("run_started_timestamp_seconds", "When the run started.", started),
        ("run_cells", "Cells of the run that have a record.", len(report.cells)),
        ("run_failures", failures, len(report.failed)),
    ):
        Gauge(PREFIX + name, meaning, list(host), registry=registry).labels(**host).set(value)
    meanings = {name: f"Column {name} of a cell's record." for name in PUBLISHED}
    meanings["ok"] = "1 if every trial finished and parity passed, else 0."
    gauges = {
        name: Gauge(f"{PREFIX}cell_{name}", meaning, LABELS, registry=registry)
        for name, meaning in meanings.items()
    }
    written = records(report)
    for record in written:
        labels = {name: str(record[name]) for name in LABELS if name in record}
        labels |= host | {"cell": record["cell_name"]}
        for name, value in (_figures(record) | {"ok": int(record["ranked"])}).items():
            gauges[name].labels(**labels).set(value)
    matrix = re.sub(r"[^\w.-]", "_", matrix_name(report.run.matrix))[:100]
    file = folder / f"{PREFIX}{matrix}.prom"
    write_to_textfile(str(file), registry)
    return Published(file, len(written), 0)
