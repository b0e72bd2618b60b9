"""Throughput over numbers of devices that nobody here has: predicted from measured cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.planner.local.cpu_prediction import CellFacts
from harness.planner.local.local_calibration import CpuCalibration

OUTSIDE = 0.05
"""By how much the half-width of an interval grows with each doubling of the devices beyond those
that were measured, as a logarithm. Assumed: nothing measures beyond its own range."""


@dataclass(frozen=True)
class ScalingInput:
    """A cell at some number of devices."""

    devices: int
    samples: int
    """Of a step, all devices together."""
    facts: CellFacts
    measured: float | None = None
    """Samples per second; None where it was not measured."""


@dataclass(frozen=True)
class ScalingPoint:
    """What is predicted there, in samples per second; `low` and `high` bound an 80 % interval."""

    devices: int
    predicted: float
    low: float
    high: float
    measured: float | None
    doublings_beyond: float
    """Of the devices, beyond the most that were measured; 0 within."""


@dataclass(frozen=True)
class ScalingCurve:
    """A strategy over numbers of devices."""

    label: str
    points: tuple[ScalingPoint, ...]
    end: str
    """Why it goes no further; empty where it goes as far as asked."""


def straggling(devices: int, seen: int, spread: float) -> float:
    """By which share a step is longer on so many devices than on the `seen` ones that its `spread`
    was measured on.

    A step ends with its slowest device. The largest of n normal deviations is about the standard
    deviation times sqrt(2 ln n) (Cramer, Mathematical Methods of Statistics, 1946, section 28.6).
    `spread`: standard deviation of the logarithm of a device's steps.
    """
    return spread * max(
        0.0, math.sqrt(2 * math.log(max(devices, 1))) - math.sqrt(2 * math.log(max(seen, 1)))
    )


def curve(
    label: str,
    places: Sequence[ScalingInput],
    calibration: CpuCalibration,
    most_measured: int,
    spread: float,
    end: str = "",
) -> ScalingCurve:
    """The curve of one strategy. `most_measured`: devices of the largest measured cells; `spread`:
    see `straggling`."""
    facts = [place.facts for place in places]
    seconds = calibration.seconds(facts)
    widths = calibration.time_spread.of(facts, calibration.time_effects)
    points = []
    for place, second, width in zip(places, seconds.tolist(), widths.tolist(), strict=True):
        beyond = max(0.0, math.log2(place.devices / most_measured))
        step = second * (1 + straggling(place.devices, most_measured, spread))
        wide = float(np.exp(width + OUTSIDE * beyond))
        rate = place.samples / step
        points.append(
            ScalingPoint(place.devices, rate, rate / wide, rate * wide, place.measured, beyond)
        )
    return ScalingCurve(label, tuple(points), end)
