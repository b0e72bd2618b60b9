from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import ndtr

from harness.planner.local.cpu_prediction import CellColumns, CellFacts, Observation, step_seconds
from harness.planner.local.local_calibration import CpuCalibration
from harness.spec.cell import Cell
from harness.spec.errors import UsageError

LocalGoal = Literal["throughput", "memory"]
DEVIATIONS_IN_80_PERCENT = 1.2816
DEVIATIONS_IN_95_PERCENT = 1.96
SURE = 0.9
"""Probability from which a cell fits, if memory is the goal."""
PART_WORDS = {
    "compute": "the model's own arithmetic",
    "calls": "calling operators",
    "update": "the optimizer's update",
    "exchange": "collectives on this machine",
    "link": "exposed transfers over the link",
}
MOST_NAMED = 5
OUTSIDE = 0.05
"""Assumed increase of a log half-width per doubling beyond the measured devices."""


@dataclass(frozen=True)
class LocalVariant:
    cell: Cell
    facts: CellFacts
    observation: Observation | None = None


@dataclass(frozen=True)
class LocalCandidate:
    """A cell with its step time and memory; `low` and `high` bound 80 % intervals."""

    name: str
    cell_id: str
    label: str
    exact: bool
    measured: bool
    seconds: float
    seconds_low: float
    seconds_high: float
    relative: float
    """Half-width of the 80 % interval of its log step time relative to another's."""
    samples_per_second: float
    peak_bytes: float
    """Memory of the fullest rank."""
    peak_low: float
    peak_high: float
    fits: float
    """Probability that all ranks fit into this machine's memory."""
    parts: dict[str, float]
    """Predicted seconds by key of PART_WORDS."""


@dataclass(frozen=True)
class LocalPlan:
    setting: str
    goal: LocalGoal
    candidates: tuple[LocalCandidate, ...]
    """Exact cells, best first."""
    inexact: tuple[LocalCandidate, ...]
    """Cells that train differently."""
    refused: dict[str, int]
    calibrated_on: int
    workloads: tuple[str, ...]


def open_questions(candidates: Sequence[LocalCandidate], goal: LocalGoal) -> list[LocalCandidate]:
    """Returns candidates tied with the first one in what the goal ranks by."""
    best, half_width = _goal_value(candidates[0], goal)
    tied = []
    for candidate in candidates[1:]:
        value, width = _goal_value(candidate, goal)
        if abs(math.log(value / best)) <= math.hypot(width, half_width):
            tied.append(candidate)
    return tied


def _goal_value(candidate: LocalCandidate, goal: LocalGoal) -> tuple[float, float]:
    """Returns the bytes or seconds that a goal ranks by, and the half-width of their log."""
    if goal == "memory":
        return candidate.peak_bytes, math.log(candidate.peak_high / candidate.peak_low) / 2
    return candidate.seconds, candidate.relative


def rank_variants(
    setting: str,
    variants: Sequence[LocalVariant],
    calibration: CpuCalibration,
    batch: int,
    memory_bytes: int,
    goal: LocalGoal = "throughput",
    refused: Counter[str] | None = None,
) -> LocalPlan:
    """Ranks the variants of one setting; raises UsageError if none can run.

    `batch`: samples per step; `memory_bytes`: for all ranks.
    """
    if not variants:
        reasons = "; ".join(reason for reason, _ in (refused or Counter()).most_common(3))
        raise UsageError(f"no strategy can run {setting}: {reasons or 'none is known'}")
    ranked = sorted(
        _candidates(variants, calibration, batch, memory_bytes),
        key=lambda candidate: _key(candidate, goal),
    )
    return LocalPlan(
        setting,
        goal,
        tuple(candidate for candidate in ranked if candidate.exact),
        tuple(candidate for candidate in ranked if not candidate.exact),
        dict((refused or Counter()).most_common()),
        calibration.cells,
        calibration.workloads,
    )


def _key(candidate: LocalCandidate, goal: LocalGoal) -> tuple[bool, float]:
    if goal == "memory":
        return candidate.fits < SURE, candidate.peak_bytes
    return False, candidate.seconds / max(candidate.fits, 1e-300)


def _candidates(
    variants: Sequence[LocalVariant], calibration: CpuCalibration, batch: int, memory_bytes: int
) -> list[LocalCandidate]:
    facts = [variant.facts for variant in variants]
    columns = CellColumns(facts)
    step = step_seconds(columns, calibration.time, calibration.time_effects.of(facts))
    missed = calibration.time_effects.missed(facts)
    parts = {name: getattr(step, name) * missed for name in PART_WORDS}
    total = step.total * missed
    peaks = calibration.peak_bytes(facts)
    wide = np.exp(calibration.time_spread.of(facts, calibration.time_effects))
    of_memory = calibration.memory_spread.of(facts, calibration.memory_effects)
    result = []
    for row, variant in enumerate(variants):
        seconds, peak = float(total[row]), float(peaks[row])
        low, high = seconds / float(wide[row]), seconds * float(wide[row])
        spread = float(of_memory[row])
        relative = calibration.time_spread.relative
        if variant.facts.variant not in calibration.time_effects.variants:
            relative = calibration.time_spread.unknown
        if observed := variant.observation:
            seconds = observed.seconds
            low, high = _narrowed(observed)
            relative = math.log(high / low) / 2
            if observed.peak_bytes:
                peak, spread = observed.peak_bytes, min(spread, 0.02)
        demand = peak * variant.facts.ranks
        fits = float(ndtr(np.log(memory_bytes / demand) * DEVIATIONS_IN_80_PERCENT / spread))
        result.append(
            LocalCandidate(
                name=variant.cell.name,
                cell_id=variant.cell.id,
                label=variant.facts.label,
                exact=variant.facts.exact,
                measured=observed is not None,
                seconds=seconds,
                seconds_low=low,
                seconds_high=high,
                relative=relative,
                samples_per_second=batch / seconds,
                peak_bytes=peak,
                peak_low=peak / float(np.exp(spread)),
                peak_high=peak * float(np.exp(spread)),
                fits=fits,
                parts={name: float(part[row]) for name, part in parts.items()},
            )
        )
    return result


def _narrowed(observed: Observation) -> tuple[float, float]:
    """Returns a measured step's 80 % interval; within 10 % after a single trial."""
    low, seconds, high = observed.seconds_low, observed.seconds, observed.seconds_high
    if low is None or high is None:
        return seconds / 1.1, seconds * 1.1
    share = DEVIATIONS_IN_80_PERCENT / DEVIATIONS_IN_95_PERCENT
    return seconds * (low / seconds) ** share, seconds * (high / seconds) ** share


def explanation(plan: LocalPlan) -> list[str]:
    sentences = []
    if plan.candidates:
        best = plan.candidates[0]
        sentences += [_first(best), _time(best), _apart(plan)]
    else:
        sentences.append("No cell of this setting matches training in one process exactly.")
    if faster := _faster(plan):
        sentences.append(faster)
    sentences.append(
        f"Predicted from {plan.calibrated_on} measured cells of {', '.join(plan.workloads)}."
    )
    return [sentence for sentence in sentences if sentence]


def _first(best: LocalCandidate) -> str:
    how = "measured" if best.measured else "predicted"
    return (
        f"Use {best.label}: {best.seconds * 1e3:.0f} ms per step ({how}), and"
        f" {best.peak_bytes / 1e6:.0f} MB on its fullest rank."
    )


def _time(best: LocalCandidate) -> str:
    total = sum(best.parts.values())
    shares = sorted(best.parts.items(), key=lambda item: -item[1])
    listed = [f"{v / total:.0%} {PART_WORDS[name]}" for name, v in shares if v / total >= 0.01]
    return f"Its predicted step is {', '.join(listed)}."


def _apart(plan: LocalPlan) -> str:
    tied = open_questions(plan.candidates, plan.goal)
    in_memory = plan.goal == "memory"
    if not tied:
        worse = "need significantly more memory" if in_memory else "are significantly slower"
        best, *others = (_goal_value(candidate, plan.goal)[0] for candidate in plan.candidates)
        # Such a cell has a later place only because it may not fit.
        better = any(value < best for value in others)
        return f"All others {worse}{' or are less likely to fit' if better else ''}."
    names = [candidate.label for candidate in tied[:MOST_NAMED]]
    if len(tied) > MOST_NAMED:
        names.append(f"{len(tied) - MOST_NAMED} more")
    missing = sum(not candidate.measured for candidate in (plan.candidates[0], *tied))
    also = f"; {missing} of these were not measured" if missing else ""
    return f"Tied with it{' in memory' if in_memory else ''}: {', '.join(names)}{also}."


def _faster(plan: LocalPlan) -> str:
    if not plan.inexact or plan.goal != "throughput":
        return ""
    other = plan.inexact[0]
    if plan.candidates and other.seconds_high >= plan.candidates[0].seconds_low:
        return ""
    return (
        f"Faster, but a different training: {other.label}, {other.seconds * 1e3:.0f} ms per step."
    )


@dataclass(frozen=True)
class ScalingInput:
    devices: int
    samples: int
    facts: CellFacts
    measured: float | None = None
    """Samples per second."""


@dataclass(frozen=True)
class ScalingPoint:
    """Predicted samples per second; `low` and `high` bound an 80 % interval."""

    devices: int
    predicted: float
    low: float
    high: float
    measured: float | None
    doublings_beyond: float
    """Doublings beyond the measured devices; 0 within them."""


@dataclass(frozen=True)
class ScalingCurve:
    label: str
    points: tuple[ScalingPoint, ...]
    end: str
    """Reason why the curve ends; empty at the requested end."""


def straggling(devices: int, seen: int, spread: float) -> float:
    """Returns the fraction by which steps on `devices` are longer than on the `seen` measured ones.

    The slowest of n devices deviates by about sqrt(2 ln n) standard deviations (Cramer,
    Mathematical Methods of Statistics, 1946, section 28.6). `spread`: standard deviation of a
    device's log step time.
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
    """Returns one strategy's curve; `most_measured`: size of the largest measured cells."""
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
