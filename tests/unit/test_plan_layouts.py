"""Which layouts `plan` considers, and what it charges to which software and device."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from harness.planner.cluster.calibration import load
from harness.planner.cluster.cluster_plan import device_counts, plan
from harness.planner.cluster.hardware import cluster_of
from harness.planner.cluster.hf_config import parse_shape
from harness.planner.cluster.prediction import NEW_DEVICE, predict
from harness.planner.cluster.question import (
    ClusterQuestion,
    PlannedLayout,
    PlannedLayouts,
    enumerate_layouts,
)
from harness.planner.cluster.recipe import RECOMPUTE

CALIBRATION = load()


def question_of(model: str, devices: int, batch: int, device: str = "h100-80gb") -> ClusterQuestion:
    cluster = cluster_of(device, 8, "nvlink,400gbit")
    return ClusterQuestion(parse_shape(model), cluster, 4096, batch, devices)


@pytest.mark.parametrize("devices", [1, 3, 5, 7, 24])
def test_each_number_of_devices_is_one_column(devices: int) -> None:
    counts = device_counts(question_of("llama-1b", devices, 8))
    assert counts == sorted({*counts})
    assert devices in counts


def test_every_micro_batch_that_divides_is_considered() -> None:
    layouts = enumerate_layouts(question_of("llama-1b", 8, 8 * 60))
    alone = layouts.take((layouts.data == 8) & (layouts.zero == 3) & (layouts.offload == 0))
    assert {3, 5, 6, 10, 12, 15, 20, 30, 60} < {*alone.micro_batch.tolist()}
    assert (alone.micro_batch * alone.accumulation == 60).all()


def test_offload_is_only_for_models_that_do_not_fit_without() -> None:
    fitting = plan(question_of("llama-8b", 8, 64), CALIBRATION, top=1000)
    assert not any(row.layout.offload for row in fitting.candidates)
    large = plan(question_of("llama-70b", 8, 64), CALIBRATION, top=3)
    assert large.candidates[0].layout.offload


def test_only_nanotron_keeps_a_second_copy_of_gradients() -> None:
    question = question_of("playbook-3b", 16, 64)
    same = dataclasses.replace(question.cluster, links=CALIBRATION.links)
    layouts = PlannedLayouts.of([PlannedLayout(data=8, tensor=2, zero=1, accumulation=8)])
    other, nanotron = (
        predict(dataclasses.replace(question, cluster=cluster), layouts, CALIBRATION)
        for cluster in (question.cluster, same)
    )
    copy = CALIBRATION.memory.bucket * question.shape.parameters / 2
    assert nanotron.memory.demand - other.memory.demand == pytest.approx(copy, rel=0.01)


def test_devices_without_measured_runs_have_wider_intervals() -> None:
    layouts = PlannedLayouts.of([PlannedLayout(data=4, tensor=2, zero=1, accumulation=4)])
    known, new = (
        predict(question_of("llama-8b", 8, 16, device), layouts, CALIBRATION).half_width
        for device in ("h100-80gb", "b200-180gb")
    )
    assert new == pytest.approx(np.hypot(known, NEW_DEVICE))


def test_half_of_the_layers_can_be_recomputed() -> None:
    """It lies between none and all in memory and time, whichever code trains."""
    question = question_of("llama-8b", 8, 64)
    for shared in ({"data": 8, "zero": 3}, {"data": 4, "tensor": 2, "zero": 1}):
        layouts = PlannedLayouts.of(
            [
                PlannedLayout(**shared, micro_batch=2, accumulation=4, recompute=kind)
                for kind in map(RECOMPUTE.index, ("none", "half", "full"))
            ]
        )
        found = predict(question, layouts, CALIBRATION)
        assert (np.diff(found.memory.activations) < 0).all()
        assert (np.diff(found.seconds) > 0).all()
