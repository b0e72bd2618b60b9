"""Estimates throughputs of a run's cells, with variances shrunk towards a common one.

Cells' variances scatter about a common one as a scaled inverse chi-square (Smyth, Statistical
Applications in Genetics and Molecular Biology 3 (2004), section 3). The common one is a power of
the steps per trial, instead of voom's curve (Law, Chen, Shi and Smyth, Genome Biology 15 (2014),
R29). Parameters are maximum-likelihood estimates.
"""

from __future__ import annotations

import json
import math
import operator
import statistics
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from harness.analysis.race import heat_of, joined
from harness.analysis.stats import LogEstimate
from harness.cell.cell import Cell
from harness.record.trial import TrialRecord

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Window:
    """Log mean seconds over consecutive timed steps."""

    step: float
    control: float


@dataclass(frozen=True)
class Adjustment:
    spread_before: float
    """Standard deviation of log step time between trials."""
    spread_after: float

    @property
    def helps(self) -> bool:
        """Whether the control reduces the spread; otherwise it is not used."""
        return self.spread_after < self.spread_before


NONE = Adjustment(0.0, 0.0)


def mean_window(windows: Sequence[Window]) -> Window:
    return Window(
        statistics.fmean(window.step for window in windows),
        statistics.fmean(window.control for window in windows),
    )


def adjustment(cells: Mapping[str, Sequence[Window]]) -> Adjustment:
    """Returns zeros if no cell has two trials."""
    before, after, degrees = 0.0, 0.0, 0
    for trials in cells.values():
        if len(trials) < 2:
            continue
        repeats = len(trials) - 1
        before += repeats * statistics.variance(trial.step for trial in trials)
        after += repeats * statistics.variance(trial.step - trial.control for trial in trials)
        degrees += repeats
    if not degrees:
        return NONE
    return Adjustment(math.sqrt(before / degrees), math.sqrt(after / degrees))


T = TypeVar("T")
FEWEST_FOR_PRIOR = 3
"""Minimum number of variances for estimating a prior; fewer variances are pooled."""
USUAL_POWER = -1.0
"""Exponent of steps per trial in the variance if few cells show it, as for independent steps."""
FEWEST_FOR_TREND = 12
LEAST_DEGREES, MOST_DEGREES = 1.0, 1000.0
STEEPEST = 2.0
FORK_SERVER = "elastic"
"""Launcher whose ranks come from the suite's fork server."""
WARMUP_STEPS: int = Cell.model_fields["warmup_steps"].default
ALLOWANCE = 0.006
"""Standard deviation of a cell's log effect on its control: the 95% upper bound from 20 trials of
twelve cells with four launchers (docs/studies/overhead.md)."""


@dataclass(frozen=True)
class Spread:
    variance: float
    degrees: float
    averaged: float = 1.0
    """Number of timed steps per trial."""


@dataclass(frozen=True)
class VariancePrior:
    """Common variance of a run's cells."""

    variance: float
    """Variance of a trial with one timed step (`averaged` is 1)."""
    degrees: float
    """Degrees of freedom; infinite if cells' variances do not differ."""
    power: float = 0.0
    """Exponent of `averaged` in the variance."""

    def of(self, spread: Spread) -> float:
        return float(self.variance * spread.averaged**self.power)


def moderated(spreads: Sequence[Spread]) -> list[Spread]:
    """Returns the cells' variances, shrunk towards the common variance. Cells with a single trial
    get the common variance."""
    common = prior(spreads)
    if common is None:
        return list(spreads)
    if math.isinf(common.degrees):
        pooled = sum(spread.degrees for spread in spreads)
        return [Spread(common.of(measured), pooled, measured.averaged) for measured in spreads]
    return [
        Spread(
            (common.degrees * common.of(measured) + measured.degrees * measured.variance)
            / (common.degrees + measured.degrees),
            common.degrees + measured.degrees,
            measured.averaged,
        )
        for measured in spreads
    ]


def prior(spreads: Sequence[Spread]) -> VariancePrior | None:
    informative = [spread for spread in spreads if spread.degrees > 0 and spread.variance > 0]
    if not informative:
        return None
    if len(informative) < FEWEST_FOR_PRIOR:
        degrees = sum(spread.degrees for spread in informative)
        total = sum(
            spread.variance * spread.averaged**-USUAL_POWER * spread.degrees
            for spread in informative
        )
        return VariancePrior(total / degrees, math.inf, USUAL_POWER)
    return _most_likely(informative)


def _most_likely(spreads: Sequence[Spread]) -> VariancePrior:
    import numpy as np
    from scipy.optimize import minimize
    from scipy.special import betaln

    variances = np.array([spread.variance for spread in spreads])
    degrees_of = np.array([spread.degrees for spread in spreads])
    logs = np.log([spread.averaged for spread in spreads])
    middle = float(np.mean(logs))
    with_trend = len(spreads) >= FEWEST_FOR_TREND and float(np.ptp(logs)) > math.log(2)

    def unlikely(parameters: NDArray[np.float64]) -> float:
        level, log_degrees, power = (*map(float, parameters), USUAL_POWER)[:3]
        if not math.log(LEAST_DEGREES) <= log_degrees <= math.log(MOST_DEGREES):
            return math.inf
        if abs(power) > STEEPEST:
            return math.inf
        degrees = math.exp(log_degrees)
        common = np.exp(level + power * (logs - middle))
        share = degrees_of / degrees * variances / common
        terms = (
            degrees_of / 2 * np.log(share)
            - (degrees_of + degrees) / 2 * np.log1p(share)
            - betaln(degrees_of / 2, degrees / 2)
        )
        return -float(terms.sum())

    level = math.log(statistics.median(variances) + 1e-300)
    start = [level, math.log(5.0), *([-0.5] if with_trend else [])]
    optimum = minimize(
        unlikely, start, method="Nelder-Mead", options={"xatol": 1e-3, "fatol": 1e-3}
    )
    level, log_degrees, power = (*map(float, optimum.x), USUAL_POWER)[:3]
    degrees = math.exp(log_degrees)
    return VariancePrior(
        math.exp(level - power * middle),
        math.inf if degrees > MOST_DEGREES / 2 else degrees,
        power,
    )


@dataclass(frozen=True)
class RunEstimates:
    cells: Mapping[str, LogEstimate] = field(default_factory=dict)
    """Log samples per second, by cell id."""
    by_trial: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """Adjusted samples per second by cell id and trial number."""
    adjustment: Adjustment = NONE
    """Adjustment for cells without disk offload and with a core per rank."""


def estimates_of(finished: Sequence[TrialRecord]) -> RunEstimates:
    """Returns estimates from one run's trials that have a throughput. Trials of a heat (an
    interleaved batch of trials) are joined with the separate trials. A cell without separate trials
    has nothing to tie its heats to, so its trials count as separate; only runs of older versions
    have such cells."""
    alone = {trial.cell_id for trial in finished if not trial.turn_began}
    in_heats = [trial for trial in finished if trial.turn_began and trial.cell_id in alone]
    estimates = _of_separate(
        [trial for trial in finished if not (trial.turn_began and trial.cell_id in alone)]
    )
    return _with_heats(estimates, in_heats, finished) if in_heats else estimates


def _with_heats(
    estimates: RunEstimates, in_heats: Sequence[TrialRecord], finished: Sequence[TrialRecord]
) -> RunEstimates:
    heats: dict[int, dict[str, TrialRecord]] = {}
    for trial in in_heats:
        heats.setdefault(trial.trial, {})[trial.cell_id] = trial
    values = [
        heat_of({cell_id: trial.turn_samples_per_second for cell_id, trial in heat.items()})
        for heat in heats.values()
    ]
    apart = {trial.cell_id for trial in in_heats if trial.launcher != FORK_SERVER}
    joint, levels = joined(estimates.cells, values, apart)
    by_trial = {
        (trial.cell_id, trial.trial): math.exp(value[trial.cell_id] - level)
        for heat, value, level in zip(heats.values(), values, levels, strict=True)
        for trial in heat.values()
    }
    level_errors: dict[Hashable, float] = {}
    for trial in in_heats:
        error, key = joint[trial.cell_id].level_error, computing(trial)
        level_errors[key] = max(error, level_errors.get(key, 0.0))
    further = {trial.cell_id: level_errors.get(computing(trial), 0.0) for trial in finished}
    cells = {
        cell_id: replace(
            cell,
            error=math.hypot(cell.error, further[cell_id]),
            included_level_error=further[cell_id],
        )
        for cell_id, cell in estimates.cells.items()
    }
    return replace(
        estimates,
        cells={**cells, **joint},
        by_trial={**estimates.by_trial, **by_trial},
    )


def _of_separate(finished: Sequence[TrialRecord]) -> RunEstimates:
    windows = [windows_of(trial) for trial in finished]
    measured = [mean_window(trial_windows) if trial_windows else None for trial_windows in windows]
    adjustments = _adjustments(finished, measured)
    usual = _usual_controls(finished, windows)
    logs: dict[str, list[float]] = {}
    steps: dict[str, list[int]] = {}
    lengths: dict[str, list[int]] = {}
    by_trial: dict[tuple[str, int], float] = {}
    controls: dict[str, float] = {}
    adjusted: set[str] = set()
    for trial, trial_windows, parts in zip(finished, measured, windows, strict=True):
        assert trial.samples_per_second is not None
        value = math.log(trial.samples_per_second)
        if trial_windows:
            value = math.log(trial.global_batch) - trial_windows.step
            controls[trial.cell_id] = usual[computing(trial)]
            if adjustments[_kind(trial)].helps:
                adjusted.add(trial.cell_id)
                value += trial_windows.control - controls[trial.cell_id]
        logs.setdefault(trial.cell_id, []).append(value)
        steps.setdefault(trial.cell_id, []).append(steps_of(trial))
        lengths.setdefault(trial.cell_id, []).append(max(1, len(parts)))
        by_trial[trial.cell_id, trial.trial] = math.exp(value)
    oversubscribed = {trial.cell_id for trial in finished if trial.oversubscribed}
    alone = logs.keys() - oversubscribed
    estimates = log_estimates(_part(logs, alone), steps, lengths)
    estimates |= log_estimates(_part(logs, oversubscribed), steps, lengths)
    cells = {
        cell_id: replace(
            estimate,
            control=controls.get(cell_id),
            adjusted=cell_id in adjusted,
            allowance=ALLOWANCE if cell_id in adjusted else 0.0,
        )
        for cell_id, estimate in estimates.items()
    }
    return RunEstimates(cells, by_trial, adjustments.get((False, False), NONE))


def _adjustments(
    trials: Sequence[TrialRecord], measured: Sequence[Window | None]
) -> dict[tuple[bool, bool], Adjustment]:
    kinds: dict[tuple[bool, bool], dict[str, list[Window]]] = {}
    for trial, window in zip(trials, measured, strict=True):
        if window:
            kinds.setdefault(_kind(trial), {}).setdefault(trial.cell_id, []).append(window)
    return {kind: adjustment(cells) for kind, cells in kinds.items()}


def _usual_controls(
    trials: Sequence[TrialRecord], windows: Sequence[Sequence[Window]]
) -> dict[Hashable, float]:
    together: dict[Hashable, list[float]] = {}
    for trial, trial_windows in zip(trials, windows, strict=True):
        if trial_windows:
            together.setdefault(computing(trial), []).extend(
                window.control for window in trial_windows
            )
    return {key: statistics.median(controls) for key, controls in together.items()}


def log_estimates(
    logs: Mapping[str, Sequence[float]],
    steps: Mapping[str, Sequence[int]],
    lengths: Mapping[str, Sequence[int]],
) -> dict[str, LogEstimate]:
    """Returns estimates by cell id, without an allowance.

    `steps`: timed steps of each trial. `lengths`: windows of each trial, which determine its
    weight.
    """
    weighted = {
        cell_id: _weighted(values, _weights(lengths[cell_id]), statistics.fmean(steps[cell_id]))
        for cell_id, values in logs.items()
    }
    spreads = moderated([spread for _, spread in weighted.values()])
    return {
        cell_id: LogEstimate(
            mean,
            math.sqrt(spread.variance / len(logs[cell_id])),
            spread.degrees,
            len(logs[cell_id]),
        )
        for (cell_id, (mean, _)), spread in zip(weighted.items(), spreads, strict=True)
    }


def _weighted(
    values: Sequence[float], weights: Sequence[float], averaged: float
) -> tuple[float, Spread]:
    mean = math.fsum(map(operator.mul, weights, values)) / len(values)
    squares = (weight * (value - mean) ** 2 for weight, value in zip(weights, values, strict=True))
    degrees = len(values) - 1
    variance = math.fsum(squares) / degrees if degrees else 0.0
    return mean, Spread(variance, degrees, averaged)


def _weights(lengths: Sequence[int]) -> list[float]:
    """Returns weights with mean 1, rounded to ratios of powers of two, because smaller differences
    in length come from the machine's speed."""
    middle = statistics.median(lengths)
    powers = [2.0 ** round(math.log2(length / middle)) for length in lengths]
    return [power / statistics.fmean(powers) for power in powers]


def _part(logs: Mapping[str, T], cells: Set[str]) -> dict[str, T]:
    return {cell_id: value for cell_id, value in logs.items() if cell_id in cells}


def steps_of(trial: TrialRecord) -> int:
    warmup: int = json.loads(trial.cell).get("warmup_steps", WARMUP_STEPS)
    return max(1, (trial.steps_taken or len(trial.losses)) - warmup)


def windows_of(trial: TrialRecord) -> list[Window]:
    """Returns a trial's windows; empty if it had no control."""
    columns = (trial.window_step_seconds, trial.window_control_seconds)
    return [Window(*map(math.log, values)) for values in zip(*columns, strict=True)]


def _kind(trial: TrialRecord) -> tuple[bool, bool]:
    """Returns whether a trial keeps states on disk and whether it is oversubscribed. Both decide
    how its times depend on core speed."""
    return trial.offload_kept_bytes is not None, bool(trial.oversubscribed)


def computing(trial: TrialRecord) -> Hashable:
    """Returns what the trial's control computes."""
    shape = (trial.workload, trial.data, trial.sequence_length, trial.processes)
    return *shape, trial.threads_per_device, trial.oversubscribed
