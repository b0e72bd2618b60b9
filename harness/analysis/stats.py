from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

CONFIDENCE = 0.95
PAIR_CONFIDENCE = 0.995
"""Confidence of a comparison of two cells, in a run or between runs."""
CONTROL_MISMATCH = 0.15
"""Standard deviation of the exponent with which step times follow the control's time."""
OUTLIER = 0.04
"""Additional standard deviation of a trial's log throughput between runs, for outliers: one trial
in 200 of the reference run is 13% off, twice as far as normal values."""
EQUAL = 0.02
"""Cells tie if their ratio's 95% interval is within this of 1."""
SMALLEST_EFFECT = 0.005
ESTIMATE_METHOD = (
    "geometric mean over trials, with a 95% interval. A trial is an independent launch and"
    " counts once: by the mean of its timed steps if a control ran, else by their median. The"
    " interval is Student's t on the logarithms, with variances moderated over all cells of the"
    " run (Smyth, Statistical Applications in Genetics and Molecular Biology 3, 2004). For a cell"
    " with one trial, the spread of the other cells is assumed. Trials that"
    " were interleaved in a heat are compared within it, by least squares over all heats"
)
ESTIMATES_COMPARED = (
    "ratio of the geometric means over trials with Student's t interval of their logarithms,"
    f" {100 * PAIR_CONFIDENCE:g}%, with spreads that are moderated over all cells of the run and"
    " allowances for what more trials would not reveal; a cell counts as faster or slower if the"
    " interval excludes 1 and the ratio differs from 1 by at least 0.5%. Of 1,896 comparisons of"
    " equal cells in two runs, 13 were false alarms (docs/studies/statistical-power.md)"
)
SpeedVerdict = Literal["faster", "slower", "no difference seen"]


@dataclass(frozen=True)
class Estimate:
    """Mean or median over trials with its 95% interval, which is None below two trials."""

    value: float
    low: float | None
    high: float | None
    trials: int


MOST_DEGREES = 1000.0
"""Degrees of freedom from which Student's t is practically normal."""


@dataclass(frozen=True)
class LogEstimate:
    """Mean logarithm over trials, with its standard error and degrees of freedom."""

    mean: float
    error: float
    degrees: float
    trials: int
    control: float | None = None
    """Log of the control's usual time in the run; None without a control."""
    adjusted: bool = True
    """Whether the mean is adjusted by the control, if the run has one."""
    allowance: float = 0.0
    """Standard deviation of effects that repetition does not reduce."""
    level_error: float = 0.0
    """Further error of the value, which all cells of a `part` share, so that it cancels in their
    ratios."""
    part: int | None = None
    """Number of a group of connected heats; None outside heats."""
    included_level_error: float = 0.0
    """Level error of heats that is already part of `error`; 0 inside heats."""

    @property
    def whole_error(self) -> float:
        """Standard error in a comparison with another cell."""
        return math.hypot(self.error, self.allowance)

    @property
    def whole_degrees(self) -> float:
        """Degrees of freedom of `whole_error` (Satterthwaite, Biometrics Bulletin 2, 1946)."""
        if self.error <= 0:
            return MOST_DEGREES if self.allowance else self.degrees
        return min(MOST_DEGREES, self.degrees * (1 + (self.allowance / self.error) ** 2) ** 2)

    def estimate(self, confidence: float = CONFIDENCE) -> Estimate:
        """Returns the value with Student's t interval; without an interval if there is no degree of
        freedom."""
        if self.degrees <= 0:
            return Estimate(math.exp(self.mean), None, None, self.trials)
        half = students_t(confidence, self.degrees) * math.hypot(self.error, self.level_error)
        return Estimate(
            math.exp(self.mean), math.exp(self.mean - half), math.exp(self.mean + half), self.trials
        )


def ratio(
    first: LogEstimate, second: LogEstimate, confidence: float = PAIR_CONFIDENCE
) -> Comparison:
    """Returns the ratio of two cells of one run.

    Degrees of freedom do not add up, as both spreads are moderated over the same cells.
    """
    count, mean = min(first.trials, second.trials), first.mean - second.mean
    if first.degrees <= 0 or second.degrees <= 0:
        return comparison(mean, None, count)
    half = students_t(confidence, min(first.whole_degrees, second.whole_degrees))
    half *= difference_error(first, second)
    return comparison(mean, half, count)


def difference_error(first: LogEstimate, second: LogEstimate) -> float:
    """Returns the standard error of the difference of two cells' logarithms."""
    return math.hypot(first.whole_error, second.whole_error, added_level_error([(first, second)]))


def added_level_error(
    pairs: Sequence[tuple[LogEstimate, LogEstimate]], to_scatter: bool = False
) -> float:
    """Returns the standard error that parts' levels add to the pairs' mean log ratio.

    A level cancels in pairs within its part, but is common to all pairs with another part.
    `to_scatter`: whether to add it to the pairs' scatter, which includes no level.
    """
    levels: dict[int, float] = {}
    included = 0.0
    for pair in pairs:
        for estimate, sign in zip(pair, (1, -1), strict=True):
            included += 0.0 if to_scatter else estimate.included_level_error**2
            if estimate.part is not None:
                level = levels.get(estimate.part, 0.0)
                levels[estimate.part] = level + sign * estimate.level_error
    return math.sqrt(max(0.0, sum(level**2 for level in levels.values()) - included)) / len(pairs)


def between_runs(
    first: LogEstimate,
    second: LogEstimate,
    confidence: float = PAIR_CONFIDENCE,
    same_control: bool = True,
) -> Comparison:
    """Returns the ratio of a cell's estimates in two runs, each adjusted by its run's control. The
    interval allows for outliers, and for steps that slow down more or less than the control.
    Without `same_control`, or if a run was not adjusted, it also covers the unadjusted ratio; if a
    run was not adjusted, the ratio itself is unadjusted. Degrees of freedom: Welch (Biometrika 34,
    1947)."""
    mean, count = first.mean - second.mean, min(first.trials, second.trials)
    drift = 0.0
    if first.control is not None and second.control is not None:
        drift = first.control - second.control
    if first.degrees <= 0 or second.degrees <= 0:
        return comparison(mean + drift, None, count)
    of_first, of_second = (
        estimate.error**2 + estimate.level_error**2 for estimate in (first, second)
    )
    parts = of_first**2 / first.degrees + of_second**2 / second.degrees
    outliers = sum((OUTLIER / estimate.trials) ** 2 for estimate in (first, second))
    errors = of_first + of_second + outliers
    degrees = min(MOST_DEGREES, errors**2 / parts) if parts else MOST_DEGREES
    error = math.hypot(math.sqrt(errors), CONTROL_MISMATCH * drift)
    found = comparison(mean + drift, students_t(confidence, degrees) * error, count)
    adjusted = first.adjusted and second.adjusted
    if not drift or (same_control and adjusted):
        return found
    unadjusted = between_runs(
        replace(first, control=None), replace(second, control=None), confidence
    )
    lows, highs = (unadjusted.low, found.low), (unadjusted.high, found.high)
    return replace(
        found if adjusted else unadjusted,
        low=min(low for low in lows if low is not None),
        high=max(high for high in highs if high is not None),
    )


def median_error(trials: int) -> float:
    """Returns the standard error of the median over that of the mean, for normal values. Within 1%
    of Hojo's values (Biometrika 23, 1931, pages 315 to 360)."""
    if trials <= 2:
        return 1.0
    return math.sqrt(math.pi * trials / (2 * trials + (0.95 if trials % 2 else 2.65)))


@functools.cache
def students_t(confidence: float, degrees: float) -> float:
    """Returns Student's t (Biometrika 6, 1908) for a two-sided interval, without `scipy.stats`,
    whose import takes almost a second."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + confidence) / 2))


def estimate(values: Sequence[float]) -> Estimate:
    """Returns the median with its 95% interval, which is None for one value. The interval is
    Student's t times the standard error of a normal median (Hojo, Biometrika 23, 1931)."""
    median, count = statistics.median(values), len(values)
    if count < 2:
        return Estimate(median, None, None, count)
    half = students_t(CONFIDENCE, count - 1) * median_error(count) * statistics.stdev(values)
    half /= math.sqrt(count)
    return Estimate(median, median - half, median + half, count)


@dataclass(frozen=True)
class Comparison:
    """Ratio of throughputs with its interval, which is None with too few trials."""

    ratio: float
    low: float | None
    high: float | None
    rounds: int

    @property
    def precision(self) -> float | None:
        if self.low is None or self.high is None:
            return None
        return (self.high - self.low) / 2 / self.ratio

    @property
    def verdict(self) -> SpeedVerdict:
        """Verdict on the first cell; no difference without an interval."""
        if (
            self.low is None
            or self.high is None
            or self.low <= 1 <= self.high
            or abs(self.ratio - 1) < SMALLEST_EFFECT
        ):
            return "no difference seen"
        return "faster" if self.ratio > 1 else "slower"


def compare_runs(
    first: Sequence[float], second: Sequence[float], confidence: float = PAIR_CONFIDENCE
) -> Comparison | None:
    """Compares throughputs without common rounds by Welch's t of logs (Biometrika 34, 1947)."""
    if not first or not second:
        return None
    a, b = ([math.log(value) for value in values] for values in (first, second))
    mean, count = statistics.fmean(a) - statistics.fmean(b), min(len(a), len(b))
    if count < 2:
        return comparison(mean, None, count)
    errors = [statistics.variance(logs) / len(logs) for logs in (a, b)]
    if not sum(errors):
        return comparison(mean, 0.0, count)
    degrees = sum(errors) ** 2 / sum(
        e**2 / (len(logs) - 1) for e, logs in zip(errors, (a, b), strict=True)
    )
    return comparison(mean, students_t(confidence, degrees) * math.sqrt(sum(errors)), count)


def comparison(mean: float, half: float | None, count: int) -> Comparison:
    """Returns a ratio from its logarithm and half width, without an interval if the half width is
    unknown."""
    if half is None:
        return Comparison(math.exp(mean), None, None, count)
    high = math.exp(mean + half) if mean + half < 700 else math.inf
    return Comparison(math.exp(mean), math.exp(mean - half), high, count)


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Returns each step's time on the slowest rank. `by_rank`: times by rank and step."""
    return [max(ranks) for ranks in zip(*by_rank, strict=True)]


def over_cycles(values: Sequence[float], steps: Sequence[int], cycle: int) -> list[float]:
    """Returns means over `cycle` consecutive steps, or over all values if there are fewer."""
    starts = [
        i for i in range(len(values) - cycle + 1) if steps[i + cycle - 1] - steps[i] == cycle - 1
    ]
    return [sum(values[i : i + cycle]) / cycle for i in starts] or [sum(values) / len(values)]


def mean_of_cycles(values: Sequence[float], steps: Sequence[int], cycle: int) -> float:
    """Returns the mean with equal weight for each position of the cycle. `steps`: step numbers."""
    places: dict[int, list[float]] = {}
    for step, value in zip(steps, values, strict=True):
        places.setdefault(step % cycle, []).append(value)
    return statistics.fmean(map(statistics.fmean, places.values()))


def percentile(values: Sequence[float], share: float) -> float:
    """Interpolates linearly between order statistics (Hyndman and Fan 1996, type 7)."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def trend(values: Sequence[float]) -> float | None:
    """Returns the relative change over the steps (Theil and Sen's slope) if Kendall's tau shows a
    trend (p < 0.01), else 0; None for fewer than 8 steps."""
    if len(values) < 8:
        return None
    if len(set(values)) == 1:
        return 0.0
    from scipy.stats import kendalltau, theilslopes

    if kendalltau(range(len(values)), values).pvalue >= 0.01:
        return 0.0
    slope = float(theilslopes(values).slope)
    return slope * (len(values) - 1) / statistics.median(values)


def efficiency(throughput: float, devices: int, single_throughput: float) -> float:
    """Returns throughput over `devices` times that of one device; 1.0 is ideal."""
    return throughput / (devices * single_throughput)
