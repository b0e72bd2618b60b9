"""Answers `bench predict` and `bench whatif`."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from harness.analysis.setting import Setting
from harness.planner.local.local_calibration import (
    CpuCalibration,
    base_of,
    calibrate_cells,
    leave_out,
    with_spreads,
)
from harness.planner.local.local_plan import (
    LocalGoal,
    LocalPlan,
    LocalVariant,
    ScalingCurve,
    ScalingInput,
    curve,
    rank_variants,
)
from harness.planner.local.measurements import (
    LocalCell,
    LocalMeasurements,
    data_for,
    facts_of,
    variants_of,
)
from harness.spec.cell import Cell
from harness.spec.errors import Refused, Unavailable, UsageError
from harness.spec.link import Link, link_text
from harness.strategy.registry import validate
from harness.workloads import make_workload

DEFAULT_RANKS = 2
MAX_CURVES = 6
NORMAL_95 = 1.645
"""95th percentile of a normal distribution, in standard deviations."""


@dataclass(frozen=True)
class PlanRequest:
    """What to train and what to rank by; None means as in most measured cells."""

    workload: str | None = None
    devices: int | None = None
    per_node: int | None = None
    link: str | None = None
    sequence_length: int | None = None
    batch: int | None = None
    precision: str | None = None
    goal: str = "throughput"
    unseen: bool = False
    """Whether to ignore measurements of the model."""

    def check(self) -> None:
        """Raises UsageError for an impossible value."""
        if self.workload:
            make_workload(self.workload)
        for name, value, least in (
            ("--devices", self.devices, 1),
            ("--per-node", self.per_node, 1),
            ("--seq", self.sequence_length, 2),
            ("--batch", self.batch, 1),
        ):
            if value is not None and value < least:
                raise UsageError(f"{name} {value}: give at least {least}")
        if self.precision not in (None, "fp32", "bf16", "fp16"):
            raise UsageError(f"--precision {self.precision!r}: give fp32, bf16 or fp16")
        links = self.links
        if self.per_node is not None and not links:
            raise UsageError("ranks per node need a link: without one all ranks are on one node")
        devices, per_node = self.devices or DEFAULT_RANKS, self.per_node or 1
        if links and (devices % per_node or devices == per_node):
            raise UsageError(
                f"{devices} devices, {per_node} per node: a link needs at least two nodes, all of"
                " them full"
            )
        if self.goal not in get_args(LocalGoal):
            goals = " or ".join(get_args(LocalGoal))
            raise UsageError(f"--goal {self.goal!r}: on this machine give {goals}")

    @property
    def links(self) -> str:
        """Text of the emulated link, or empty; raises UsageError if it is malformed."""
        try:
            return link_text(self.link or "")
        except ValueError as error:
            raise UsageError(f"--link {self.link!r}: {error}") from None

    def setting(self, measured: LocalMeasurements) -> Setting:
        settings = Counter(Setting.of(local.cell) for local in measured.cells)
        usual, links = settings.most_common(1)[0][0], self.links
        devices = self.devices or DEFAULT_RANKS
        workload = self.workload or usual.workload
        return dataclasses.replace(
            usual,
            workload=workload,
            data=data_for(workload, usual),
            devices=devices,
            global_batch=self.batch or usual.global_batch,
            sequence_length=self.sequence_length or usual.sequence_length,
            precision=self.precision or "fp32",
            nodes=devices // (self.per_node or 1) if links else 1,
            links=links,
        )


def calibrated(measured: LocalMeasurements, unseen: str = "") -> CpuCalibration:
    """Fits measured cells, except those of `unseen`; raises UsageError with too few."""
    observations = [
        cell.observation
        for cell in measured.cells
        if not unseen or base_of(cell.observation.facts) != unseen.split("+")[0]
    ]
    return with_spreads(calibrate_cells(observations), leave_out(observations))


def plan_setting(
    setting: Setting, request: PlanRequest, measured: LocalMeasurements, calibration: CpuCalibration
) -> tuple[LocalPlan, list[LocalVariant]]:
    """Returns a setting's plan and variants; raises UsageError if nothing can run."""
    goal: LocalGoal = next(goal for goal in get_args(LocalGoal) if goal == request.goal)
    variants, refused = variants_of(setting, measured, not request.unseen)
    batch, memory = setting.global_batch, measured.memory_bytes
    plan = rank_variants(setting.text, variants, calibration, batch, memory, goal, Counter(refused))
    return plan, variants


def sweep_settings(
    setting: Setting, request: PlanRequest, measured: LocalMeasurements, calibration: CpuCalibration
) -> dict[str, dict[int, LocalPlan | str]]:
    """Returns plans, or why nothing can run, by workload and number of ranks. Covers requested
    and measured workloads, and powers of two up to this machine's cores."""
    counts = sorted({1, setting.devices, *(n for n in (2, 4, 8, 16, 32) if n <= measured.cores)})
    per_node = request.per_node or 1
    answers: dict[str, dict[int, LocalPlan | str]] = {}
    for workload in dict.fromkeys((setting.workload, *calibration.workloads)):
        for devices in counts:
            links = setting.links if devices > per_node else ""
            varied = dataclasses.replace(
                setting,
                workload=workload,
                data=data_for(workload, setting),
                devices=devices,
                links=links,
                nodes=-(-devices // per_node) if links else 1,
            )
            try:
                answer: LocalPlan | str = plan_setting(varied, request, measured, calibration)[0]
            except UsageError as error:
                answer = str(error)
            answers.setdefault(workload, {})[devices] = answer
    return answers


@dataclass(frozen=True)
class ScalingRequest:
    max_devices: int
    weak: bool
    link: Link | None
    """Link between devices, each on its own node; None if they share a machine."""


def scalable_cells(measured: LocalMeasurements) -> list[LocalCell]:
    """Returns measured multi-device cells with a core each and no emulated link; raises
    UsageError."""
    cells = [
        cell
        for cell in measured.cells
        if cell.cell.devices > 1
        and not cell.cell.links
        and not cell.result.placement.oversubscribed
        and cell.result.placement.stand_in is None
    ]
    if not cells:
        raise UsageError(
            "no cell on several devices with a core each was measured here, so the cost of"
            " exchanging data is unknown; run some, such as matrix smoke"
        )
    return cells


def fastest_cells(cells: Sequence[LocalCell]) -> list[LocalCell]:
    """Returns the fastest MAX_CURVES cells, if possible exact, of the most-measured workload."""
    exact = [cell for cell in cells if cell.observation.facts.exact] or list(cells)
    workload = statistics.mode(cell.cell.workload for cell in exact)
    same = [cell for cell in exact if cell.cell.workload == workload]
    same = [cell for cell in same if cell.cell.precision == same[0].cell.precision]
    return sorted(same, key=lambda cell: cell.observation.seconds / cell.cell.global_batch)[
        :MAX_CURVES
    ]


def step_spread(measured: LocalMeasurements) -> float:
    """Returns the median cell's standard deviation of log step time."""
    ratios = [
        math.log(result.times.step_seconds_p95 / result.times.step_seconds_p50) / NORMAL_95
        for cell in measured.cells
        if (result := cell.result).times.step_seconds_p50 and result.times.step_seconds_p95
    ]
    return max(0.0, statistics.median(ratios)) if ratios else 0.0


def scaled(
    start: LocalCell,
    measured: LocalMeasurements,
    calibration: CpuCalibration,
    request: ScalingRequest,
) -> ScalingCurve:
    """Returns one measured cell's curve over 1, 2, 4, ... devices."""
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
    most = max(
        cell.cell.devices for cell in measured.cells if not cell.result.placement.oversubscribed
    )
    return curve(start.cell.label, inputs, calibration, most, step_spread(measured), end)


def _input(cell: Cell, measured: LocalMeasurements, request: ScalingRequest) -> ScalingInput:
    facts = dataclasses.replace(facts_of(cell, measured), cores=cell.devices)
    if request.link and cell.devices > 1:
        facts = dataclasses.replace(
            facts,
            link_bytes_per_second=(request.link.bits_per_second or math.inf) / 8,
            link_seconds=request.link.delay_seconds,
        )
        return ScalingInput(cell.devices, cell.global_batch, facts)
    same = [
        other.result.speed.samples_per_second
        for other in measured.cells
        if not other.result.placement.oversubscribed
        and other.observation.facts.setting == facts.setting
        and other.observation.facts.label == facts.label
    ]
    return ScalingInput(cell.devices, cell.global_batch, facts, same[0] if same else None)
