"""Which layouts `plan` considers, and what it charges to which software and device."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from harness.planner.cluster.calibration import load
from harness.planner.cluster.cluster_plan import plan
from harness.planner.cluster.hardware import cluster_of
from harness.planner.cluster.hf_config import parse_shape
from harness.planner.cluster.prediction import NEW_DEVICE, predict
from harness.planner.cluster.question import (
    AXES,
    ClusterQuestion,
    PlannedLayout,
    PlannedLayouts,
    enumerate_layouts,
)
from harness.planner.cluster.recipe import PROGRAMS, RECOMPUTE

CALIBRATION = load()


def question_of(model: str, devices: int, batch: int, device: str = "h100-80gb") -> ClusterQuestion:
    cluster = cluster_of(device, 8, "nvlink,400gbit")
    return ClusterQuestion(parse_shape(model), cluster, 4096, batch, devices)


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


def test_nanotron_by_name_keeps_its_second_copy_on_all_links() -> None:
    question = question_of("playbook-3b", 16, 64)
    layouts = PlannedLayouts.of([PlannedLayout(data=8, tensor=2, zero=1, accumulation=8)])
    other, nanotron = (
        predict(dataclasses.replace(question, like=like), layouts, CALIBRATION).memory.demand
        for like in ("megatron", "nanotron")
    )
    copy = CALIBRATION.memory.bucket * question.shape.parameters / 2
    assert nanotron - other == pytest.approx(copy, rel=0.01)


@pytest.mark.parametrize("like", [name for name in PROGRAMS if name])
def test_only_layouts_of_the_program_are_considered(like: str) -> None:
    program = PROGRAMS[like]
    question = dataclasses.replace(question_of("mixtral-8x7b", 16, 64), like=like)
    layouts = enumerate_layouts(question)
    assert {*layouts.zero.tolist()} <= {*program.zero}
    used = {name for name in AXES[1:] if (getattr(layouts, name) > 1).any()}
    used |= {"chunks"} & {*program.offers} if (layouts.chunks > 1).any() else set()
    used |= {"offload"} if layouts.offload.any() else set()
    assert used == {*program.offers}
    assert not (program.synchronised and layouts.whole_gradients.any())


def test_a_program_that_writes_gradients_over_logits_needs_less() -> None:
    """llm-foundry trained 760M parameters with 12 x 2048 tokens on each A100-40 (its published
    benchmarks)."""
    shape = "layers=24,hidden=1536,heads=12,feed_forward=6144,vocabulary=50368,gated=0,tied=1"
    cluster = cluster_of("a100-40gb", 8, "nvlink,200gbit")
    question = ClusterQuestion(parse_shape(shape), cluster, 2048, 96, 8, "pure-bf16")
    layouts = PlannedLayouts.of([PlannedLayout(data=8, zero=3, micro_batch=12)])
    plain, same = (
        predict(dataclasses.replace(question, like=like), layouts, CALIBRATION).fits[0]
        for like in ("", "llm-foundry")
    )
    assert plain < 0.2
    assert same > 0.5


def test_experts_that_span_nodes_exchange_over_the_network() -> None:
    """GPT-OSS 120B took 10.18 s on 64 B200 with experts over all of them (Megatron-Bridge)."""
    shape = (
        "layers=36,hidden=2880,heads=64,kv_heads=8,head_size=64,feed_forward=2880,"
        "vocabulary=201088,experts=128,experts_per_token=4"
    )
    question = dataclasses.replace(question_of(shape, 64, 1280, "b200-180gb"), like="megatron")
    layouts = PlannedLayouts.of(
        [
            PlannedLayout(data=64, expert=expert, zero=1, micro_batch=4, accumulation=5)
            for expert in (8, 64)
        ]
    )
    inside, across = predict(question, layouts, CALIBRATION).seconds
    assert inside < 6
    assert across == pytest.approx(10.18, rel=0.2)


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
