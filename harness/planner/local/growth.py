"""Extends measured cells to more devices than this machine has."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness.planner.local.local_calibration import CpuCalibration
from harness.planner.local.measurements import LocalCell, LocalMeasurements, facts_of
from harness.planner.local.scaling_curves import ScalingCurve, ScalingInput, curve
from harness.spec.cell import Cell
from harness.spec.errors import Refused, Unavailable, UsageError
from harness.spec.link import Link
from harness.strategy.registry import validate
from harness.workloads import make_workload

MAX_CURVES = 6
NORMAL_95 = 1.645
"""95th percentile of a normal distribution, in standard deviations."""


@dataclass(frozen=True)
class ScalingRequest:
    max_devices: int
    weak: bool
    """Whether the batch grows with the devices (weak scaling)."""
    link: Link | None
    """Link between devices, each a separate node; None if they share a machine with a core for
    each."""


def scalable_cells(measured: LocalMeasurements) -> list[LocalCell]:
    """Returns the measured cells on several devices with a core each and no emulated link; raises
    UsageError if there are none."""
    cells = [
        cell
        for cell in measured.cells
        if cell.cell.devices > 1
        and not cell.cell.links
        and not cell.result.oversubscribed
        and cell.result.stand_in is None
    ]
    if not cells:
        raise UsageError(
            "no cell on several devices with a core each was measured here, so the cost of"
            " exchanging data is unknown; run some, such as those of matrix smoke"
        )
    return cells


def fastest_cells(cells: Sequence[LocalCell]) -> list[LocalCell]:
    """Returns the fastest MAX_CURVES cells of the most-measured workload, in one precision; only
    exact ones, if there are any."""
    exact = [cell for cell in cells if cell.observation.facts.exact] or list(cells)
    workload = statistics.mode(cell.cell.workload for cell in exact)
    same = [cell for cell in exact if cell.cell.workload == workload]
    same = [cell for cell in same if cell.cell.precision == same[0].cell.precision]
    return sorted(same, key=lambda cell: cell.observation.seconds / cell.cell.global_batch)[
        :MAX_CURVES
    ]


def step_spread(measured: LocalMeasurements) -> float:
    """Returns the median cell's standard deviation of the logarithmic step time."""
    ratios = [
        math.log(result.step_seconds_p95 / result.step_seconds_p50) / NORMAL_95
        for cell in measured.cells
        if (result := cell.result).step_seconds_p50 and result.step_seconds_p95
    ]
    return max(0.0, statistics.median(ratios)) if ratios else 0.0


def scaled(
    start: LocalCell,
    measured: LocalMeasurements,
    calibration: CpuCalibration,
    request: ScalingRequest,
) -> ScalingCurve:
    """Returns the curve of one measured cell over 1, 2, 4, ... devices."""
    inputs: list[ScalingInput] = []
    end = ""
    per_device = max(1, start.cell.global_batch // start.cell.devices)
    devices = 1
    while devices <= request.max_devices:
        batch = per_device * devices if request.weak else start.cell.global_batch
        cell = start.cell.model_copy(update={"devices": devices, "global_batch": batch})
        try:
            validate(cell, make_workload(cell.workload))
        except (Refused, Unavailable, UsageError) as error:
            end = f"{devices} devices: {error}"
            if inputs:
                break
        else:
            inputs.append(_input(cell, measured, request))
            end = ""
        devices *= 2
    most = max(cell.cell.devices for cell in measured.cells if not cell.result.oversubscribed)
    return curve(start.cell.label, inputs, calibration, most, step_spread(measured), end)


def _input(cell: Cell, measured: LocalMeasurements, request: ScalingRequest) -> ScalingInput:
    facts = dataclasses.replace(facts_of(cell, measured), cores=cell.devices)
    if request.link and request.link.bits_per_second and cell.devices > 1:
        facts = dataclasses.replace(
            facts,
            link_bytes_per_second=request.link.bits_per_second / 8,
            link_seconds=request.link.delay_seconds,
        )
    same = [
        other.result.samples_per_second
        for other in measured.cells
        if not other.result.oversubscribed
        and other.observation.facts.setting == facts.setting
        and other.observation.facts.label == facts.label
    ]
    return ScalingInput(cell.devices, cell.global_batch, facts, same[0] if same else None)
