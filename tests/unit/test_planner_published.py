"""Predictions of tables that others published, of software and devices that the calibration has not
seen; docs/studies/planner-accuracy.md has these errors."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from harness.planner.cluster.calibration import load
from harness.planner.cluster.hardware import cluster_of
from harness.planner.cluster.model_names import parse_shape
from harness.planner.cluster.model_shape import ModelShape
from harness.planner.cluster.prediction import predict
from harness.planner.cluster.question import ClusterQuestion, PlannedLayout, PlannedLayouts

CALIBRATION = load()

MEGATRON = """
gpt-22b  1  4 1 8   4   1.42  1.10
gpt-175b 8  1 3 64  64  18.13 13.75
gpt-530b 35 1 3 280 280 49.05 37.83
gpt-1t   64 1 1 512 512 94.42 71.49
"""
"""Seconds of a step with full, and with selective, recomputation, of sequences of 2048 tokens on
A100 (Korthikanti and others, arXiv 2205.05198, table 5): model, pipeline, micro-batch, chunks of a
stage, devices, batch; tensor parallelism over 8."""

MPT_SIZES = {
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
"""Layers, hidden size and heads (llm-foundry, scripts/train/yamls/pretrain)."""
MPT_H100 = """
70b 64 8 4 2 1039
70b 32 2 16 2 882
30b 32 14 3 2 2308
30b 8 3 21 2 2002
13b 64 2 1 0 4800
13b 8 2 1 0 4792
7b 8 6 1 0 10643
3b 64 6 3 0 22525
3b 16 10 3 0 24142
1b 64 20 1 0 44402
1b 8 14 1 0 45455
"""
MPT_A100 = """
70b 64 8 4 2 410
30b 8 3 21 2 916
13b 8 2 3 0 2262
7b 8 6 2 0 4641
3b 8 10 2 0 10811
1b 8 14 4 0 20513
"""
"""Tokens per second and device of FSDP with full sharding, sequences of 2048 tokens (MPT Training
Benchmarks, llm-foundry, the README of its benchmarks of training): model, devices,
micro-batch, accumulation, recomputation (0 none, 2 whole layers)."""


def test_megatron_is_predicted_roughly() -> None:
    cluster = cluster_of("a100-80gb", 8, "nvlink,200gbit")
    errors = []
    for line in MEGATRON.strip().splitlines():
        model, *rest = line.split()
        pipeline, size, chunks, devices, batch = map(int, rest[:5])
        asked = ClusterQuestion(parse_shape(model), cluster, 2048, batch, devices)
        layout = PlannedLayout(
            pipeline=pipeline,
            tensor=8,
            micro_batch=size,
            accumulation=batch // size,
            chunks=chunks,
        )
        both = [dataclasses.replace(layout, recompute=kind) for kind in (2, 1)]
        seconds = predict(asked, PlannedLayouts.of(both), CALIBRATION).seconds
        errors += (seconds / np.array([float(value) for value in rest[5:]]) - 1).tolist()
    assert np.median(np.abs(errors)) <= 0.15
    assert max(map(abs, errors)) <= 0.3


@pytest.mark.parametrize(
    ("device", "link", "rows", "median", "most"),
    [
        ("h100-80gb", "nvlink,400gbit", MPT_H100, 0.08, 0.2),
        ("a100-80gb", "nvlink,200gbit", MPT_A100, 0.08, 0.15),
    ],
)
def test_full_sharding_is_predicted(
    device: str, link: str, rows: str, median: float, most: float
) -> None:
    cluster = cluster_of(device, 8, link)
    errors = []
    for line in rows.strip().splitlines():
        name, *rest = line.split()
        devices, size, steps, recompute, measured = map(int, rest)
        layers, hidden, heads = MPT_SIZES[name]
        shape = ModelShape(name, layers, hidden, heads, 4 * hidden, 50368, gated=False, tied=True)
        asked = ClusterQuestion(shape, cluster, 2048, devices * size * steps, devices)
        layout = PlannedLayout(
            data=devices, zero=3, micro_batch=size, accumulation=steps, recompute=recompute
        )
        seconds = predict(asked, PlannedLayouts.of([layout]), CALIBRATION).seconds[0]
        errors.append(measured * seconds / (2048 * size * steps) - 1)
    assert np.median(np.abs(errors)) <= median
    assert max(map(abs, errors)) <= most


LLAMA_405B = """
8192  64  1  8192   430
16384 128 1  8192   400
16384 8   16 131072 380
"""
"""TFLOP/s of each device (Llama 3, arXiv 2407.21783, table 4): devices, data, context, sequence
length; tensor parallelism over 8, 16 stages, 16 million tokens in a step. That each has 8 chunks
follows from 126 layers, with one layer less in the first and the last."""


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
        done = shape.flops_per_token(sequence) * 2**24 / devices / 1e12
        assert seconds[1] < seconds[0]
        assert abs(seconds[1] * measured / done - 1) <= 0.3
