"""Derives the width of intervals for software and devices that the calibration never saw.

`.venv/bin/python -m docs.studies.planner_widths` predicts runs that others published
(published_runs.csv) with the built-in constants, none of which was fitted to them, as `plan --like`
does. It prints the figure `UNMEASURED` of the planner and each source's scores, or with `--data
RUNS.csv` or BENCH_CLUSTERS_DATA those of a further table.

Sources:

- MPT Training Benchmarks (llm-foundry, scripts/train/benchmarking)
- Megatron-LM (arXiv 2205.05198, table 5)
- KempnerForge (benchmarks/mfu_scaling, weak_scaling_160gpu and 175b_360gpu, 2026); all but one run
  are compiled
- torchtitan (documents of 2024 on A100, benchmarks/llama3_h100_202412 at 500 W)
- Llama 3 (arXiv 2407.21783, table 4, without its run with split sequences; 8 chunks are assumed)
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from harness.planner.cluster.calibration import LEVEL, Floats, load
from harness.planner.cluster.hardware import cluster_of
from harness.planner.cluster.hf_config import parse_shape
from harness.planner.cluster.prediction import UNMEASURED, predict, unmeasured_kinds
from harness.planner.cluster.question import ClusterQuestion, PlannedLayout, PlannedLayouts
from harness.planner.cluster.recipe import precision_named

PUBLISHED = Path(__file__).with_name("published_runs.csv")
PROGRAMS = {
    "mpt": "llm-foundry",
    "llm-foundry": "llm-foundry",
    "megatron": "megatron",
    "Megatron": "megatron",
    "SimuMax": "megatron",
    "torchtitan": "torchtitan",
    "fms-fsdp": "fms-fsdp",
}
"""Programs by the start of a source's name."""
WITHIN, UNLIKELY = 1.25, 0.2
"""Factor of time that counts as close, and odds that no run should have had."""


@dataclass(frozen=True)
class PublishedRun:
    source: str
    question: ClusterQuestion
    layout: PlannedLayout
    seconds: float
    allocated_bytes: float
    """Peak of the tensors; NaN if the source does not give it."""


def published_runs(file: Path = PUBLISHED) -> Iterator[PublishedRun]:
    for row in csv.DictReader(file.read_text(encoding="utf-8").splitlines()):
        layout = PlannedLayout(
            **{f.name: int(row[f.name]) for f in fields(PlannedLayout) if f.name in row}
        )
        program = [name for start, name in PROGRAMS.items() if row["source"].startswith(start)]
        question = ClusterQuestion(
            parse_shape(row["model"]),
            cluster_of(row["device"], int(row["per_node"]), row["link"]),
            int(row["sequence_length"]),
            layout.data * layout.micro_batch * layout.accumulation,
            layout.devices,
            precision_named(row["precision"]),
            *program,
        )
        peak = float(row.get("peak_gib") or "nan") * 2**30
        yield PublishedRun(row["source"], question, layout, float(row["seconds"]), peak)


def scores(file: Path) -> pd.DataFrame:
    """Returns each source's number of runs, errors, and shares of runs that are predicted well."""
    rows, constants = [], load()
    for run in published_runs(file):
        found = predict(run.question, PlannedLayouts.of([run.layout]), constants)
        log = float(np.log(run.seconds / found.seconds[0]))
        of_memory = float(np.log(run.allocated_bytes / found.memory.allocated[0]))
        rows.append(
            {
                "source": run.source,
                "time": abs(np.expm1(log)),
                "bias": -log,
                "within 1.25": abs(log) < np.log(WITHIN),
                "in interval": -found.half_width[0] <= log <= found.upper[0],
                "memory": abs(np.expm1(of_memory)),
                "memory in interval": np.nan
                if np.isnan(of_memory)
                else float(abs(of_memory) <= found.memory_half_width[0]),
                "wrong odds": float(found.fits[0] < UNLIKELY),
            }
        )
    table = pd.DataFrame(rows)
    both = pd.concat([table, table.assign(source="all")]).groupby("source", sort=False)
    medians = both[["time", "bias", "memory"]].median()
    shares = both[["within 1.25", "in interval", "memory in interval"]].mean()
    counts = (
        both["wrong odds"].agg(["count", "sum"]).rename(columns={"count": "runs", "sum": "odds"})
    )
    return pd.concat([counts, medians, shares], axis=1)


@dataclass(frozen=True)
class PublishedErrors:
    """Errors of published runs (each of shape [runs])."""

    sources: list[str]
    errors: Floats
    kinds: Floats
    """Number of each run's `unmeasured_kinds`."""
    within: Floats
    """Half-width for calibrated properties alone."""

    def width(self, left_out: str = "") -> float:
        """Returns the half-width per kind with which intervals hold LEVEL of the runs.

        Tables have equal weights. Half-widths of kinds add in squares.
        """
        used = np.array([source != left_out for source in self.sources])
        excess = np.maximum(0.0, self.errors**2 - self.within**2) / self.kinds
        weights = np.array([used[i] / self.sources.count(s) for i, s in enumerate(self.sources)])
        order = np.argsort(excess)
        share = np.cumsum(weights[order]) / weights.sum()
        return float(np.sqrt(excess[order][np.searchsorted(share, LEVEL)]))

    def widest(self) -> float:
        """Returns the largest width without one table, as further tables are unseen."""
        return max(self.width(source) for source in self.sources)

    def covered(self, source: str, width: float) -> float:
        rows = np.array([one == source for one in self.sources])
        held = np.abs(self.errors) <= np.sqrt(self.within**2 + width**2 * self.kinds) + 1e-9
        return float(np.mean(held[rows]))


def published_errors() -> PublishedErrors:
    """Returns the errors of runs on no more nodes than were calibrated."""
    calibration = load()
    sources, errors, kinds, within = [], [], [], []
    for run in published_runs():
        if run.question.nodes > calibration.range.nodes[1]:
            continue
        layouts = PlannedLayouts.of([run.layout])
        found = predict(run.question, layouts, calibration)
        present = unmeasured_kinds(run.question, layouts, calibration)
        count = float(sum(bool(one[0]) for one in present.values()))
        sources.append(run.source)
        errors.append(float(np.log(found.seconds[0] / run.seconds)))
        kinds.append(count)
        within.append(float(np.sqrt(found.half_width[0] ** 2 - UNMEASURED**2 * count)))
    return PublishedErrors(sources, np.array(errors), np.array(kinds), np.array(within))


def main(
    data: Annotated[
        Path | None, typer.Option(envvar="BENCH_CLUSTERS_DATA", help="Table to score.")
    ] = None,
) -> None:
    if not data:
        print(f"UNMEASURED = {published_errors().widest():.2f}")
    print(scores(data or PUBLISHED).round(3).to_string())


if __name__ == "__main__":
    typer.run(main)
