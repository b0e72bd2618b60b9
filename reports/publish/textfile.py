"""Prometheus textfile of one run for the node exporter: gauges with units in their names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness.spec.errors import UsageError
from reports.export_records import records
from reports.publish.published import FIGURES, Published, figures
from reports.run_report import ran

if TYPE_CHECKING:
    from harness.record.store import Results

FILE = "parallelism_bench.prom"
PREFIX = "parallelism_bench_"
LABELS = (
    "cell_id",
    "cell",
    "strategy",
    "workload",
    "devices",
    "precision",
    "global_batch",
    "regime",
    "matrix",
    "host",
)


def write(results: Results, folder: Path) -> Published:
    """Replaces the file atomically."""
    from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

    if len(results.runs) != 1:
        raise UsageError(
            f"a Prometheus textfile has the figures of one run, not of {len(results.runs)}: name"
            " one, by default the newest"
        )
    report = ran(results)
    registry = CollectorRegistry()
    where = {"matrix": report.run.matrix, "host": report.run.host}
    about_run = {
        "run_started_timestamp_seconds": (
            "When the run started.",
            report.run.started_at.timestamp(),
        ),
        "run_cells": ("Cells of the run that have a record.", len(report.cells)),
        "run_failures": (
            "Launched cells without a valid result, unless the matrix expects it.",
            len(report.failed),
        ),
    }
    for name, (meaning, value) in about_run.items():
        Gauge(PREFIX + name, meaning, list(where), registry=registry).labels(**where).set(value)
    gauges = {
        name: Gauge(
            f"{PREFIX}cell_{name}", f"Column {name} of a cell's record.", LABELS, registry=registry
        )
        for name in FIGURES
    }
    good = Gauge(
        f"{PREFIX}cell_ok",
        "1 if every trial finished and parity passed, else 0.",
        LABELS,
        registry=registry,
    )
    written = records(report)
    for record in written:
        labels = (
            {name: str(record[name]) for name in LABELS if name in record}
            | where
            | {"cell": record["cell_name"]}
        )
        good.labels(**labels).set(int(record["ranked"]))
        for name, value in figures(record).items():
            gauges[name].labels(**labels).set(value)
    write_to_textfile(str(folder / FILE), registry)
    return Published(folder / FILE, len(written), 0)
