"""Step times -> a trial's figures; trials -> a cell's estimate with its interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
INTERVAL_METHOD = (
    "mean over trials (independent launches) with Student's t interval of 95 %; each trial counts once, by the median of its steps"
)


@dataclass(frozen=True)
class Estimate:
    """A figure over independent trials: mean, 95 % interval (None below two trials), number of trials."""

    value: float
    low: float | None
    high: float | None
    trials: int

    @property
    def half_width(self) -> float | None:
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


def estimate(values: Sequence[float]) -> Estimate:
    """Student's t interval of the mean of one value per trial (Student, Biometrika 6, 1908)."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean, None, None, len(values))
    from scipy.stats import t

    half = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half, len(values))


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Step time of the trial: at each step the slowest rank's. `by_rank`: equally many steps for each rank."""
    return [max(ranks) for ranks in zip(*by_rank, strict=True)]


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics (Hyndman and Fan 1996, type 7: numpy's default)."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def trend(values: Sequence[float]) -> float:
    """Relative change from first to last step where Kendall's tau says there is a trend (p < 0.01), else 0.

    The slope is Theil and Sen's median of slopes; a warm-up that was long enough leaves no trend.
    """
    if len(values) < 8 or len(set(values)) == 1:
        return 0.0
    from scipy.stats import kendalltau, theilslopes

    if kendalltau(range(len(values)), values).pvalue >= 0.01:
        return 0.0
    slope = float(theilslopes(values).slope)
    return slope * (len(values) - 1) / statistics.median(values)


def efficiency(throughput: float, devices: int, single_throughput: float) -> float:
    """Throughput over `devices` times that of one device: 1.0 is ideal, for strong and for weak scaling alike."""
    return throughput / (devices * single_throughput)
