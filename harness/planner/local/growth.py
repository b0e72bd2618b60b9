"""Measured cells carried on to more devices than there are here."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.select import matches
from harness.planner.local.local_calibration import CpuCalibration
from harness.planner.local.measurements import Here, MeasuredCell, facts_of
from harness.planner.local.scaling_curves import Curve, Place, curve
from harness.spec.cell import Cell
from harness.spec.errors import Refused, Unavailable, UsageError
from harness.spec.link import Link
from harness.strategy.registry import validate
from harness.workloads import make_workload

MOST_CURVES = 6
NORMAL_95 = 1.645
"""The 95th percentile of a normal distribution in standard deviations."""


@dataclass(frozen=True)
class Growth:
    """How a cell is carried on."""

    most_devices: int
    weak: bool
    """Whether the batch grows with the devices; it stays the same otherwise."""
    link: Link | None
    """Between devices, each of which is a node of its own; None: all are on one machine, which has
    a core for each."""


def cells_to_grow(here: Here, patterns: Sequence[str]) -> list[MeasuredCell]:
    """The measured cells on the most devices that had a core each, of the strategies or patterns
    that are named; without names the fastest ones that train exactly the same.

    Raises UsageError where nothing matches.
    """
    fair = [
        known
        for known in here.cells
        if known.cell.devices > 1
        and not known.cell.links
        and not known.result.oversubscribed
        and known.result.stand_in is None
    ]
    for pattern in patterns:
        if not any(matches(known.cell, pattern) for known in fair):
            labels = ", ".join(dict.fromkeys(known.cell.label for known in fair)) or "none"
            raise UsageError(
                f"{pattern!r} matches no measured cell on several devices with a core each; there"
                f" are {labels}"
            )
    if patterns:
        return [k for k in fair if any(matches(k.cell, pattern) for pattern in patterns)]
    if not fair:
        raise UsageError(
            "no cell on several devices with a core each was measured here, so that nothing says"
            " what exchanging costs"
        )
    exact = [known for known in fair if known.measured.facts.exact] or fair
    usual = statistics.mode(known.cell.workload for known in exact)
    own = [known for known in exact if known.cell.workload == usual]
    own = [known for known in own if known.cell.precision == own[0].cell.precision]
    return sorted(own, key=lambda known: known.measured.seconds / known.cell.global_batch)[
        :MOST_CURVES
    ]


def step_spread(here: Here) -> float:
    """Standard deviation of the logarithm of a step, of the typical measured cell."""
    ratios = [
        math.log(result.step_seconds_p95 / result.step_seconds_p50) / NORMAL_95
        for known in here.cells
        if (result := known.result).step_seconds_p50 and result.step_seconds_p95
    ]
    return max(0.0, statistics.median(ratios)) if ratios else 0.0


def grown(known: MeasuredCell, here: Here, calibration: CpuCalibration, growth: Growth) -> Curve:
    """The curve of one measured cell over 1, 2, 4, ... devices."""
    places: list[Place] = []
    end = ""
    per_device = max(1, known.cell.global_batch // known.cell.devices)
    devices = 1
    while devices <= growth.most_devices:
        batch = per_device * devices if growth.weak else known.cell.global_batch
        cell = known.cell.model_copy(update={"devices": devices, "global_batch": batch})
        try:
            validate(cell, make_workload(cell.workload))
        except (Refused, Unavailable, UsageError) as error:
            if places:
                end = f"{devices} devices: {error}"
                break
        else:
            places.append(_place(cell, here, growth))
        devices *= 2
    most = max(k.cell.devices for k in here.cells if not k.result.oversubscribed)
    return curve(known.cell.label, places, calibration, most, step_spread(here), end)


def _place(cell: Cell, here: Here, growth: Growth) -> Place:
    facts = dataclasses.replace(facts_of(cell, here), cores=cell.devices)
    if growth.link and growth.link.bits_per_second and cell.devices > 1:
        facts = dataclasses.replace(
            facts,
            link_bytes_per_second=growth.link.bits_per_second / 8,
            link_seconds=growth.link.delay_seconds,
        )
    same = [
        k.result.samples_per_second
        for k in here.cells
        if not k.result.oversubscribed
        and k.measured.facts.setting == facts.setting
        and k.measured.facts.label == facts.label
    ]
    return Place(cell.devices, cell.global_batch, facts, same[0] if same else None)
