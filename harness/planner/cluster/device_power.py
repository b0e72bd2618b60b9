"""Energy of a step: what devices take while they compute, and while they wait."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from pydantic import TypeAdapter

from harness.planner.cluster.layouts import Floats
from harness.planner.cluster.question import Question
from harness.planner.cluster.step_time import StepTime
from harness.spec.errors import UsageError

COMPUTING, WAITING = 0.85, 0.45
"""Shares of its maximum power that a device takes while it computes, and while it communicates or
waits. Assumed: idle devices take about 0.1, and kernels that wait for others keep clocks high."""
SPREAD = 0.2
"""Half-width of the 80 % interval of the logarithm of these shares. Assumed: no measurement of
energy is held against them."""


@dataclass(frozen=True)
class Energy:
    """Joules of all devices for each token (shape [layouts])."""

    per_token: Floats
    half_width: Floats
    """Of the 80 % interval of its logarithm."""


@functools.cache
def watts() -> dict[str, float]:
    """The maximum power of each device by its name, from power.yaml."""
    text = Path(__file__).parents[1].joinpath("power.yaml").read_text(encoding="utf-8")
    return TypeAdapter(dict[str, float]).validate_python(yaml.safe_load(text)["watts"])


def energy(question: Question, time: StepTime, seconds: Floats, half_width: Floats) -> Energy:
    """Joules per token: devices x power x seconds, over the tokens of a step. Maximum power is the
    data sheets' (power.yaml); the shares of it are assumed.

    `seconds` and `half_width` (shape [layouts]) are of the whole step. Hosts, networks and cooling
    are not in it. Raises UsageError for a device whose power is not known.
    """
    device = question.cluster.device
    if device not in watts():
        raise UsageError(
            f"the power of device {device!r} is not in the table; known are {', '.join(watts())}"
        )
    busy = np.minimum(seconds, time.compute + time.update)
    joules = watts()[device] * (COMPUTING * busy + WAITING * (seconds - busy))
    return Energy(question.devices * joules / question.tokens, np.sqrt(half_width**2 + SPREAD**2))
