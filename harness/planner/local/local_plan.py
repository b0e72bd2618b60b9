"""Ranks the cells of one setting on this machine, measured or not, and explains the choice."""

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
"""Half-width of an 80 % interval in standard deviations of a normal distribution."""
DEVIATIONS_IN_95_PERCENT = 1.96
SURE = 0.9
"""Probability to fit from which a cell counts as fitting, where memory is the goal."""
PART_WORDS = {
    "compute": "the model's own arithmetic",
    "calls": "calling operators",
    "update": "the optimizer's update",
    "exchange": "collectives on this machine",
    "link": "exposed transfers over the link",
}
MOST_NAMED = 5


@dataclass(frozen=True)
class LocalVariant:
    """A cell that may answer the question."""

    cell: Cell
    facts: CellFacts
    observation: Observation | None = None
    """Measurement of the cell; None if there is none."""


@dataclass(frozen=True)
class LocalStepParts:
    """Seconds of a step as predicted."""

    compute: float
    calls: float
    update: float
    exchange: float
    link: float


@dataclass(frozen=True)
class LocalCandidate:
    """A cell with its step time and memory. Each `low` and `high` bound an 80 % interval."""

    name: str
    cell_id: str
    label: str
    exact: bool
    """Whether it is the same training as one process's, to rounding."""
    measured: bool
    """Whether seconds and bytes were measured; predicted otherwise."""
    seconds: float
    seconds_low: float
    seconds_high: float
    relative: float
    """Half-width of the 80 % interval of the logarithm of its step time over another cell's of this
    setting."""
    samples_per_second: float
    peak_bytes: float
    """Of the fullest rank."""
    peak_low: float
    peak_high: float
    fits: float
    """Probability that this machine's memory holds all its ranks."""
    parts: LocalStepParts


@dataclass(frozen=True)
class LocalPlan:
    """The answer."""

    setting: str
    """What is trained, on how many ranks and over which link, in words."""
    goal: LocalGoal
    candidates: tuple[LocalCandidate, ...]
    """Cells that train the same as one process, best first."""
    inexact: tuple[LocalCandidate, ...]
    """Cells that by their own declaration do not, best first."""
    refused: dict[str, int]
    """Variants that cannot run, by the reason."""
    calibrated_on: int
    """Measured cells that the predictions rest on."""
    workloads: tuple[str, ...]
    """Their workloads."""


def open_questions(candidates: Sequence[LocalCandidate]) -> list[LocalCandidate]:
    """Those that cannot be told apart from the first by their step time."""
    first = candidates[0]
    return [
        candidate
        for candidate in candidates[1:]
        if abs(math.log(candidate.seconds / first.seconds))
        <= math.hypot(candidate.relative, first.relative)
    ]


def rank_variants(
    setting: str,
    variants: Sequence[LocalVariant],
    calibration: CpuCalibration,
    batch: int,
    memory_bytes: int,
    goal: LocalGoal = "throughput",
    refused: Counter[str] | None = None,
) -> LocalPlan:
    """Ranks the variants of one setting.

    `batch`: samples of a step; `memory_bytes`: of this machine, for all ranks together. Raises
    UsageError where no variant can run.
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
    """Smaller is better: speed times the probability to fit, or the memory of what fits surely."""
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
    components = (step.compute, step.calls, step.update, step.exchange, step.link)
    parts = [component * missed for component in components]
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
        if own := variant.observation:
            seconds = own.seconds
            low, high = _narrowed(own)
            relative = math.log(high / low) / 2
            if own.peak_bytes:
                peak, spread = own.peak_bytes, min(spread, 0.02)
        demand = peak * variant.facts.ranks
        fits = float(ndtr(np.log(memory_bytes / demand) * DEVIATIONS_IN_80_PERCENT / spread))
        result.append(
            LocalCandidate(
                name=variant.cell.name,
                cell_id=variant.cell.id,
                label=variant.facts.label,
                exact=variant.facts.exact,
                measured=own is not None,
                seconds=seconds,
                seconds_low=low,
                seconds_high=high,
                relative=relative,
                samples_per_second=batch / seconds,
                peak_bytes=peak,
                peak_low=peak / float(np.exp(spread)),
                peak_high=peak * float(np.exp(spread)),
                fits=fits,
                parts=LocalStepParts(*(float(part[row]) for part in parts)),
            )
        )
    return result


def _narrowed(own: Observation) -> tuple[float, float]:
    """The 80 % interval of a measured step from its 95 % interval; 10 % either way with one
    launch."""
    if own.seconds_low is None or own.seconds_high is None:
        return own.seconds / 1.1, own.seconds * 1.1
    share = DEVIATIONS_IN_80_PERCENT / DEVIATIONS_IN_95_PERCENT
    return (
        own.seconds * (own.seconds_low / own.seconds) ** share,
        own.seconds * (own.seconds_high / own.seconds) ** share,
    )


def explanation(plan: LocalPlan) -> list[str]:
    """Sentences about the answer, most important first."""
    sentences = []
    if plan.candidates:
        best = plan.candidates[0]
        sentences += [_first(best), _time(best), _apart(plan)]
    else:
        sentences.append("No cell of this setting trains exactly the same as one process.")
    if faster := _faster(plan):
        sentences.append(faster)
    sentences.append(
        f"Predicted from {plan.calibrated_on} measured cells of {', '.join(plan.workloads)}."
    )
    return [sentence for sentence in sentences if sentence]


def _first(best: LocalCandidate) -> str:
    how = "measured" if best.measured else "predicted"
    return (
        f"Use {best.label}: a step of {best.seconds * 1e3:.0f} ms ({how}), and"
        f" {best.peak_bytes / 1e6:.0f} MB on its fullest rank."
    )


def _time(best: LocalCandidate) -> str:
    """Which parts the predicted step has."""
    parts = {name: getattr(best.parts, name) for name in PART_WORDS}
    total = sum(parts.values())
    shares = sorted(parts.items(), key=lambda item: -item[1])
    listed = [f"{v / total:.0%} {PART_WORDS[name]}" for name, v in shares if v / total >= 0.01]
    return f"By the prediction its step is {', '.join(listed)}."


def _apart(plan: LocalPlan) -> str:
    same = open_questions(plan.candidates)
    if not same:
        return "All others are slower, beyond the intervals."
    names = [candidate.label for candidate in same[:MOST_NAMED]]
    if len(same) > MOST_NAMED:
        names.append(f"{len(same) - MOST_NAMED} more")
    missing = sum(not candidate.measured for candidate in (plan.candidates[0], *same))
    also = f"; {missing} of these were not measured" if missing else ""
    return f"Not told apart from it: {', '.join(names)}{also}."


def _faster(plan: LocalPlan) -> str:
    """What is faster at the price of another training."""
    if not plan.inexact or plan.goal != "throughput":
        return ""
    other = plan.inexact[0]
    if plan.candidates and other.seconds_high >= plan.candidates[0].seconds_low:
        return ""
    return (
        f"Faster at the price of another training: {other.label}, {other.seconds * 1e3:.0f} ms a"
        " step."
    )
