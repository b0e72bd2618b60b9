"""Predictions of published runs (docs/studies/published_runs.csv) with software and devices that
the calibration has not seen; docs/studies/planner-accuracy.md lists the errors."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from docs.studies.planner_widths import published_errors, published_runs, scores
from harness.planner.cluster.calibration import load
from harness.planner.cluster.hardware import cluster_of
from harness.planner.cluster.hf_config import parse_shape
from harness.planner.cluster.model_shape import ModelShape
from harness.planner.cluster.prediction import UNMEASURED, predict
from harness.planner.cluster.question import ClusterQuestion, PlannedLayout, PlannedLayouts

CALIBRATION = load()
CLUSTERS = os.environ.get("BENCH_CLUSTERS_DATA", "")


def errors_of(source: str) -> list[float]:
    found = []
    for run in published_runs():
        if run.source == source:
            layouts = PlannedLayouts.of([run.layout])
            seconds = predict(run.question, layouts, CALIBRATION).seconds[0]
            found.append(float(seconds / run.seconds - 1))
    return found


@pytest.mark.parametrize(
    ("source", "rows", "median", "most"),
    [
        ("mpt", 17, 0.05, 0.2),
        ("megatron", 8, 0.15, 0.3),
        ("kempnerforge", 22, 0.1, 0.35),
        ("torchtitan", 4, 0.15, 0.3),
        ("llama-3", 2, 0.2, 0.3),
    ],
)
def test_published_tables_are_predicted(source: str, rows: int, median: float, most: float) -> None:
    errors = errors_of(source)
    assert len(errors) == rows
    assert np.median(np.abs(errors)) <= median
    assert max(map(abs, errors)) <= most


def test_the_width_for_unmeasured_kinds_follows_from_published_runs() -> None:
    errors = published_errors()
    assert errors.widest() == pytest.approx(UNMEASURED, abs=0.006)
    covered = [errors.covered(source, UNMEASURED) for source in errors.sources]
    assert 0.75 <= np.mean(covered) <= 0.95


@pytest.mark.skipif(not CLUSTERS, reason="set BENCH_CLUSTERS_DATA to a table of cluster runs")
def test_published_layouts_of_programs_are_predicted() -> None:
    """Mixtures that Megatron-Bridge trained need less memory than is counted."""
    found = scores(Path(CLUSTERS))
    assert found.odds["all"] == found.odds[[name.endswith("MoE") for name in found.index]].sum()
    assert found.memory["all"] < 0.1
    assert found["within 1.25"]["all"] > 0.7
    assert found["in interval"]["all"] > 0.8
    assert found["in interval"]["SimuMax B200"] > 0.7


LLAMA_405B = """
8192  64  1  8192   430
16384 128 1  8192   400
16384 8   16 131072 380
"""
"""Devices, data and context ranks, sequence length, TFLOP/s per device (Llama 3, arXiv 2407.21783,
table 4).

All have 8 tensor ranks, 16 stages and 16 million tokens per step. The 8 chunks per stage follow
from 126 layers, with one layer less in the first and the last.
"""


def flops_per_token(shape: ModelShape, sequence: int) -> float:
    """Counts six per parameter in a matrix product, plus 6 x sequence x width for causal attention
    (PaLM, arXiv 2204.02311, appendix B, halved for the mask)."""
    layer = shape.attention_parameters + shape.expert_parameters
    attention = shape.layers * sequence * shape.attention_width
    return 6.0 * (shape.layers * layer + shape.embedding_parameters + attention)


def test_thousands_of_devices_are_predicted_roughly() -> None:
    cluster = cluster_of("h100-80gb", 8, "nvlink,400gbit")
    shape = parse_shape("llama-405b")
    for line in LLAMA_405B.strip().splitlines():
        devices, data, context, sequence, measured = map(int, line.split())
        batch = 2**24 // sequence
        asked = ClusterQuestion(shape, cluster, sequence, batch, devices)
        layout = PlannedLayout(
            data=data, pipeline=16, tensor=8, context=context, zero=1, accumulation=batch // data
        )
        both = PlannedLayouts.of([layout, dataclasses.replace(layout, chunks=8)])
        seconds = predict(asked, both, CALIBRATION).seconds
        done = flops_per_token(shape, sequence) * 2**24 / devices / 1e12
        assert seconds[1] < seconds[0]
        assert abs(seconds[1] * measured / done - 1) <= 0.3
