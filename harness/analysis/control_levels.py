"""Tests whether the control's time depends on the strategy or launcher that it runs with."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.analysis.control import mean_window
from harness.analysis.estimates import computing, windows_of
from harness.record.trial import TrialRecord

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BLOCK = 12
"""Most consecutive trials in which the machine's speed counts as constant."""
SHUFFLES = 2000
LEAST_PROBABILITY = 0.01
FEWEST_LABELS = 2


@dataclass(frozen=True)
class ControlLevel:
    launcher: str
    ratio: float
    """Control time over neighbouring trials' median."""
    low: float
    high: float
    """95 % interval of the ratio."""
    trials: int


@dataclass(frozen=True)
class ControlLevels:
    launchers: tuple[ControlLevel, ...]
    labels: int
    probability: float
    """Probability of at least this difference by chance, by shuffling labels within blocks of
    consecutive trials."""

    @property
    def by_chance(self) -> bool:
        return self.probability > LEAST_PROBABILITY


def control_levels(trials: Sequence[TrialRecord]) -> ControlLevels | None:
    """Returns levels over trials with a core per rank; None for fewer than two labels."""
    blocks = _blocks(trials)
    trials = [trial for block in blocks for trial in block]
    deviations = [value for block in blocks for value in _deviations(block)]
    names = sorted(set(map(_label, trials)))
    if len(names) < FEWEST_LABELS:
        return None
    by_launcher: dict[str, list[float]] = defaultdict(list)
    for trial, value in zip(trials, deviations, strict=True):
        by_launcher[str(trial.launcher)].append(value)
    levels = [_level(name, values) for name, values in sorted(by_launcher.items())]
    return ControlLevels(tuple(levels), len(names), _probability(blocks, deviations, names))


def _label(trial: TrialRecord) -> str:
    return f"{trial.strategy} {trial.launcher}"


def _blocks(trials: Sequence[TrialRecord]) -> list[list[TrialRecord]]:
    alike: Mapping[Hashable, list[TrialRecord]] = defaultdict(list)
    for trial in sorted(trials, key=lambda trial: trial.started_at):
        if windows_of(trial) and not trial.oversubscribed:
            alike[computing(trial)].append(trial)
    return [
        members[start : start + BLOCK]
        for members in alike.values()
        for start in range(0, len(members), BLOCK)
        if len(members[start : start + BLOCK]) > 1
    ]


def _deviations(block: Sequence[TrialRecord]) -> list[float]:
    logs = [mean_window(windows_of(trial)).control for trial in block]
    middle = statistics.median(logs)
    return [log - middle for log in logs]


def _level(name: str, values: Sequence[float]) -> ControlLevel:
    from scipy.stats import t

    mean, error = statistics.fmean(values), math.inf
    if len(values) > 1:
        standard_error = statistics.stdev(values) / math.sqrt(len(values))
        error = standard_error * float(t.ppf(0.975, len(values) - 1))
    return ControlLevel(
        name, math.exp(mean), math.exp(mean - error), math.exp(mean + error), len(values)
    )


def _probability(
    blocks: Sequence[Sequence[TrialRecord]], deviations: Sequence[float], names: Sequence[str]
) -> float:
    import numpy as np

    chance = np.random.default_rng(0)
    number = {name: i for i, name in enumerate(names)}
    labels = [np.array([number[_label(trial)] for trial in block]) for block in blocks]
    values = np.array(deviations)
    observed = _differences(np.concatenate(labels)[None], values, len(names))
    shuffled = [
        chance.permuted(np.tile(labels_of_block, (SHUFFLES, 1)), axis=1)
        for labels_of_block in labels
    ]
    differences = _differences(np.concatenate(shuffled, axis=1), values, len(names))
    return (1 + int((differences >= observed).sum())) / (1 + SHUFFLES)


def _differences(
    labels: NDArray[np.int64], values: NDArray[np.float64], names: int
) -> NDArray[np.float64]:
    """Returns sums of squares between labels. `labels`: shape [shuffles, trials]; `values`: shape
    [trials]."""
    import numpy as np

    total = np.zeros(len(labels))
    for name in range(names):
        has_name = labels == name
        total += (has_name @ values) ** 2 / has_name.sum(axis=1)
    return total
