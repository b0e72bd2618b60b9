"""Predicts throughput over more devices than this machine has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.planner.local.cpu_prediction import CellFacts
from harness.planner.local.local_calibration import CpuCalibration

OUTSIDE = 0.05
"""Growth of a logarithmic interval's half-width with each doubling of the devices beyond the
measured ones. Assumed: nothing measures beyond its own range."""


@dataclass(frozen=True)
class ScalingInput:
    devices: int
    samples: int
    facts: CellFacts
    measured: float | None = None
    """Measured samples per second, if any."""


@dataclass(frozen=True)
class ScalingPoint:
    """Predicted samples per second; `low` and `high` bound an 80 % interval."""

    devices: int
    predicted: float
    low: float
    high: float
    measured: float | None
    doublings_beyond: float
    """Doublings of the devices beyond the measured ones; 0 within."""


@dataclass(frozen=True)
class ScalingCurve:
    label: str
    points: tuple[ScalingPoint, ...]
    end: str
    """Reason why the curve ends; empty at the requested end."""


def straggling(devices: int, seen: int, spread: float) -> float:
    """Returns the share by which a step is longer on `devices` than on the `seen` measured ones.

    A step ends with its slowest device. The largest of n normal deviations is about the standard
    deviation times sqrt(2 ln n) (Cramer, Mathematical Methods of Statistics, 1946, section 28.6).
    `spread` is the standard deviation of the logarithm of a device's steps.
    """
    return spread * max(
        0.0, math.sqrt(2 * math.log(max(devices, 1))) - math.sqrt(2 * math.log(max(seen, 1)))
    )


def curve(
    label: str,
    inputs: Sequence[ScalingInput],
    calibration: CpuCalibration,
    most_measured: int,
    spread: float,
    end: str = "",
) -> ScalingCurve:
    """Returns the curve of one strategy.

    `most_measured`: devices of the largest measured cells; `spread`: see `straggling`.
    """
    facts = [cell.facts for cell in inputs]
    seconds = calibration.seconds(facts)
    widths = calibration.time_spread.of(facts, calibration.time_effects)
    points = []
    for cell, second, width in zip(inputs, seconds.tolist(), widths.tolist(), strict=True):
        beyond = max(0.0, math.log2(cell.devices / most_measured))
        step = second * (1 + straggling(cell.devices, most_measured, spread))
        wide = float(np.exp(width + OUTSIDE * beyond))
        rate = cell.samples / step
        points.append(
            ScalingPoint(cell.devices, rate, rate / wide, rate * wide, cell.measured, beyond)
        )
    return ScalingCurve(label, tuple(points), end)
