"""The same question over numbers of devices and sizes of models: which layout wins where."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from harness.planner.cluster.calibration import Calibration
from harness.planner.cluster.cluster_plan import Candidate, plan
from harness.planner.cluster.model_shape import ModelShape, named_shapes
from harness.planner.cluster.question import Question
from harness.spec.errors import UsageError

MOST_SIZES = 5
SPAN = 16.0
"""Models are compared whose parameters are at most so many times more or fewer."""
STEPS_BELOW, STEPS_ABOVE = 3, 2
"""Doublings of the devices below and above those that are asked for."""


@dataclass(frozen=True)
class Square:
    """The answer for one model on one number of devices."""

    model: str
    parameters: float
    devices: int
    winner: str
    """The strategy; empty where nothing fits."""
    tokens_per_second: float
    """Of all devices; this and the next bounds are 0 where nothing fits."""
    tokens_low: float
    tokens_high: float
    memory_bytes: float
    """Of the fullest device."""
    memory_low: float
    memory_high: float
    reason: str = ""
    """Why nothing fits."""


def neighbours(shape: ModelShape) -> list[ModelShape]:
    """The model that is asked about among published ones of about its size, smallest first.

    Of several with nearly the same parameters one is enough.
    """
    chosen = [shape]
    near = [
        other
        for other in named_shapes().values()
        if 1 / SPAN <= other.parameters / shape.parameters <= SPAN
        and (other.experts > 1) == (shape.experts > 1)
    ]
    for other in sorted(near, key=lambda other: abs(other.parameters - shape.parameters)):
        apart = all(not 0.7 < other.parameters / one.parameters < 1.4 for one in chosen)
        if apart and len(chosen) < MOST_SIZES:
            chosen.append(other)
    return sorted(chosen, key=lambda one: one.parameters)


def device_counts(question: Question) -> list[int]:
    """The devices that are asked for with doublings below and above, as whole nodes fill them."""
    counts = [round(question.devices * 2.0**step) for step in range(-STEPS_BELOW, STEPS_ABOVE + 1)]
    per_node = question.cluster.per_node
    return [n for n in counts if n >= 1 and (n <= per_node or n % per_node == 0)]


def sweep(question: Question, calibration: Calibration, goal: str) -> list[Square]:
    """The best layout of each model on each number of devices, with the batch of the question."""
    return [
        _square(dataclasses.replace(question, shape=shape, devices=devices), calibration, goal)
        for shape in neighbours(question.shape)
        for devices in _possible(question, device_counts(question))
    ]


def _possible(question: Question, counts: Sequence[int]) -> list[int]:
    """Those for which the question says enough of the links."""
    several = len(question.cluster.reduce.nodes) > 1
    return [n for n in counts if several or n <= question.cluster.per_node]


def _square(question: Question, calibration: Calibration, goal: str) -> Square:
    shape = question.shape
    try:
        best: Candidate = plan(question, calibration, goal, top=1).candidates[0]
    except UsageError as error:
        return Square(
            shape.name, float(shape.parameters), question.devices, "", 0, 0, 0, 0, 0, 0, str(error)
        )
    return Square(
        shape.name,
        float(shape.parameters),
        question.devices,
        best.strategy,
        best.tokens_per_second,
        question.tokens / best.seconds_high,
        question.tokens / best.seconds_low,
        best.reserved_bytes,
        best.reserved_low,
        best.reserved_high,
    )
