"""Throughput estimates with noise pooled over a run's cells."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.analysis.control import NONE, Adjustment, Window, fitted, mean_window, usual_control
from harness.analysis.moderated import Spread, moderated
from harness.analysis.stats import LogEstimate
from harness.record.trial import TrialRecord

FIRST_VERSION = 8
"""First schema version with estimates."""


@dataclass(frozen=True)
class RunEstimates:
    cells: Mapping[str, LogEstimate] = field(default_factory=dict)
    """Logarithm of samples per second, by cell id."""
    by_trial: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """Adjusted samples per second by cell id and trial number."""
    adjustment: Adjustment = NONE
    """Adjustment of cells without disk offload and with a core per rank."""


def estimates_of(finished: Sequence[TrialRecord]) -> RunEstimates:
    """Returns estimates from one run's trials with a throughput; empty for older schema
    versions."""
    if not finished or min(trial.schema_version for trial in finished) < FIRST_VERSION:
        return RunEstimates()
    windows = [windows_of(trial) for trial in finished]
    kinds: dict[_Kind, list[int]] = {}
    for index, trial in enumerate(finished):
        kinds.setdefault(_kind(trial), []).append(index)
    adjustments = {
        kind: fitted(_launches([finished[i] for i in own], [windows[i] for i in own]))
        for kind, own in kinds.items()
    }
    usual = {key: usual_control(together) for key, together in _together(finished, windows).items()}
    logs: dict[str, list[float]] = {}
    steps: dict[str, list[int]] = {}
    by_trial: dict[tuple[str, int], float] = {}
    for trial, own in zip(finished, windows, strict=True):
        assert trial.samples_per_second is not None
        value = math.log(trial.samples_per_second)
        if own:
            middle = mean_window(own)
            taken_off = adjustments[_kind(trial)].of(middle, usual[_computing(trial)])
            value = math.log(trial.global_batch) - (middle.step - taken_off)
        logs.setdefault(trial.cell_id, []).append(value)
        steps.setdefault(trial.cell_id, []).append(steps_of(trial))
        by_trial[trial.cell_id, trial.trial] = math.exp(value)
    oversubscribed = {trial.cell_id for trial in finished if trial.oversubscribed}
    alone = logs.keys() - oversubscribed
    spreads = _moderated(logs, steps, alone) | _moderated(logs, steps, oversubscribed)
    adjusted = {
        trial.cell_id
        for trial, own in zip(finished, windows, strict=True)
        if own and adjustments[_kind(trial)].helps
    }
    cells = {
        cell_id: LogEstimate(
            statistics.fmean(values),
            math.sqrt(spreads[cell_id].variance / len(values)),
            spreads[cell_id].degrees,
            len(values),
            cell_id in adjusted,
        )
        for cell_id, values in logs.items()
    }
    return RunEstimates(cells, by_trial, adjustments.get(_Kind(False, False), NONE))


def _moderated(
    logs: Mapping[str, Sequence[float]], steps: Mapping[str, Sequence[int]], cells: Set[str]
) -> dict[str, Spread]:
    """Returns spreads by cell id, moderated over `cells`."""
    logs = {cell_id: values for cell_id, values in logs.items() if cell_id in cells}
    own = [
        Spread(
            statistics.variance(values) if len(values) > 1 else 0.0,
            len(values) - 1,
            statistics.fmean(steps[cell_id]),
        )
        for cell_id, values in logs.items()
    ]
    return dict(zip(logs, moderated(own), strict=True))


def steps_of(trial: TrialRecord) -> int:
    """Returns the recorded number of steps, at least 1."""
    return max(1, trial.steps_taken or len(trial.losses))


def windows_of(trial: TrialRecord) -> list[Window]:
    """Returns a trial's windows; empty without a control."""
    columns = (
        trial.window_step_seconds,
        trial.window_control_seconds,
        trial.window_slowest_control_seconds,
    )
    return [Window(*map(math.log, values)) for values in zip(*columns, strict=True)]


class _Kind(NamedTuple):
    """Trials whose times respond alike to the speed of the cores."""

    on_disk: bool
    """Whether it waits for a disk, which core speed does not affect."""
    oversubscribed: bool
    """Whether ranks share cores, so that they wait for each other."""


def _kind(trial: TrialRecord) -> _Kind:
    return _Kind(trial.offload_kept_bytes is not None, bool(trial.oversubscribed))


def _computing(trial: TrialRecord) -> Hashable:
    """Returns what sets the control's time on an idle machine."""
    shape = (trial.workload, trial.data, trial.sequence_length, trial.processes)
    return *shape, trial.oversubscribed


def _together(
    trials: Sequence[TrialRecord], windows: Sequence[Sequence[Window]]
) -> dict[Hashable, list[Window]]:
    together: dict[Hashable, list[Window]] = {}
    for trial, own in zip(trials, windows, strict=True):
        if own:
            together.setdefault(_computing(trial), []).extend(own)
    return together


def _launches(
    trials: Sequence[TrialRecord], windows: Sequence[Sequence[Window]]
) -> dict[Hashable, list[Sequence[Window]]]:
    launches: dict[Hashable, list[Sequence[Window]]] = {}
    for trial, own in zip(trials, windows, strict=True):
        launches.setdefault(trial.cell_id, []).append(own)
    return launches
