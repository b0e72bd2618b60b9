"""Compares cells by throughput, in pairs or across a setting.

Statements about a setting hold jointly, with 95% confidence: multiple comparisons with the best
(Hsu, Annals of Statistics 9, 1981), and two-sided gains over the baseline (Dunnett, Journal of the
American Statistical Association 50, 1955).

Differences of throughputs have t distributions, given moderated spreads (Smyth, Statistical
Applications in Genetics and Molecular Biology 3, 2004). Intervals are balanced: each alone would
hold with the same probability (Beran, Journal of the American Statistical Association 83, 1988), so
cells with few trials do not widen the intervals of others. The probability integrates over the cell
shared by all comparisons (Edwards and Hsu, Journal of the American Statistical Association 78,
1983).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from harness.analysis.cell_result import CellResult, Result, Speed
from harness.analysis.setting import SCALED, batch, by_setting, grouped, series, setting
from harness.analysis.stats import (
    CONFIDENCE,
    PAIR_CONFIDENCE,
    Comparison,
    LogEstimate,
    added_level_error,
    between_runs,
    comparison,
    efficiency,
    ratio,
)
from harness.cell.cell import BASELINE, TECHNIQUES, Cell

_NODES = 64


@dataclass(frozen=True)
class AgainstBest:
    """Simultaneous bounds on throughput over the best other cell's."""

    low: float
    high: float

    @property
    def may_be_best(self) -> bool:
        return self.high > 1


def against_best(cells: Sequence[LogEstimate]) -> list[AgainstBest]:
    return list(_against_best(tuple(cells)))


@functools.lru_cache(maxsize=256)
def _against_best(cells: tuple[LogEstimate, ...]) -> tuple[AgainstBest, ...]:
    if len(cells) < 2:
        return (AgainstBest(1.0, 1.0001),) * len(cells)
    highs = []
    candidate_widths: dict[int, list[float]] = {}
    for index, cell in enumerate(cells):
        others = [*cells[:index], *cells[index + 1 :]]
        if confident_that_beaten(cell, others) >= CONFIDENCE:
            highs.append(0.0)
            continue
        widths = half_widths(cell, others)
        ends = [cell.mean - o.mean + width for o, width in zip(others, widths, strict=True)]
        highs.append(max(1e-12, min(ends)))
        candidate_widths[index] = [*widths[:index], 0.0, *widths[index:]]
    bounds = []
    for index, (cell, high) in enumerate(zip(cells, highs, strict=True)):
        gaps = [
            cell.mean - cells[candidate].mean - widths[index]
            for candidate, widths in candidate_widths.items()
            if candidate != index
        ]
        low = min(0.0, min(gaps, default=0.0))
        bounds.append(AgainstBest(math.exp(low), math.exp(high)))
    return tuple(bounds)


def half_widths(
    cell: LogEstimate,
    others: Sequence[LogEstimate],
    two_sided: bool = False,
) -> list[float]:
    """Returns log ratios from which each difference from this cell is jointly significant."""
    from scipy.optimize import brentq

    joint = _Joint(cell, others, two_sided)
    score = brentq(lambda score: joint.share(score) - CONFIDENCE, 0.0, _FURTHEST, xtol=1e-4)
    return joint.half_widths(score)


def confident_that_beaten(cell: LogEstimate, others: Sequence[LogEstimate]) -> float:
    """Returns the joint confidence that some other cell is faster than this one."""
    joint = _Joint(cell, others, two_sided=False)
    return joint.share(joint.score([other.mean - cell.mean for other in others]))


_FURTHEST = 8.0
"""Maximum score; 6e-16 of a normal distribution lie beyond it."""


class _Joint:
    """Joint distribution of several cells' differences from one cell.

    A score is a difference in standard errors, mapped from its t to the normal distribution. Level
    errors count as independent, although cells of one part share them, which widens intervals.
    """

    def __init__(self, cell: LogEstimate, others: Sequence[LogEstimate], two_sided: bool) -> None:
        import numpy as np
        from scipy.special import ndtri

        errors = np.array(
            [math.hypot(o.whole_error, added_level_error([(cell, o)]), 1e-12) for o in others]
        )
        degrees = np.array([other.whole_degrees for other in others])
        self.errors = np.hypot(errors, cell.whole_error)
        self.degrees = np.minimum(degrees, max(cell.whole_degrees, 1e-12))
        deviations = ndtri((np.arange(_NODES) + 0.5) / _NODES) * cell.whole_error
        self.slopes = self.errors / errors
        self.offsets = deviations[:, None] / errors[None, :]
        self.two_sided = two_sided

    def half_widths(self, score: float) -> list[float]:
        from scipy.special import ndtr, stdtrit

        return list(map(float, -stdtrit(self.degrees, ndtr(-score)) * self.errors))

    def score(self, differences: Sequence[float]) -> float:
        """Returns the highest of the differences' scores."""
        import numpy as np
        from scipy.special import ndtri, stdtr

        tails = stdtr(self.degrees, -np.array(differences) / self.errors)
        return float(np.clip(-ndtri(tails.min()), -_FURTHEST, _FURTHEST))

    def share(self, score: float) -> float:
        """Returns the probability that no difference exceeds the score."""
        from scipy.special import ndtr

        within = ndtr(self.offsets + score * self.slopes)
        if self.two_sided:
            within = within - ndtr(self.offsets - score * self.slopes)
        return float(within.prod(axis=1).mean())


def gains(baseline: LogEstimate, cells: Sequence[LogEstimate]) -> list[Comparison]:
    """Returns throughputs over the baseline's, with simultaneous intervals. Raises ValueError for a
    cell without spread."""
    if not cells:
        return []
    halves = half_widths(baseline, cells, two_sided=True)
    return [
        comparison(cell.mean - baseline.mean, half, min(cell.trials, baseline.trials))
        for cell, half in zip(cells, halves, strict=True)
    ]


def compare(
    cell: CellResult,
    other: CellResult,
    confidence: float = PAIR_CONFIDENCE,
    same_control: bool = True,
) -> Comparison | None:
    """Returns the ratio of two cells' throughputs; None if a cell has no trials. `same_control`:
    see `between_runs`."""
    first, second = cell.speed.log_throughput, other.speed.log_throughput
    if first is None or second is None:
        return None
    if cell.run_id == other.run_id:
        return ratio(first, second, confidence)
    return between_runs(first, second, confidence, same_control)


def may_be_fastest(cells: Sequence[CellResult]) -> list[CellResult]:
    """Returns cells that may be a setting's fastest; all of them without a spread."""
    speeds = [cell.speed.log_throughput for cell in cells if cell.speed.log_throughput]
    if len(speeds) < len(cells) or any(speed.degrees <= 0 for speed in speeds):
        return list(cells)
    bounded = zip(cells, against_best(speeds), strict=True)
    return [cell for cell, bound in bounded if bound.may_be_best] or [*cells[:1]]


def fastest_first(cells: Iterable[Result]) -> list[Result]:
    """Sorts cells by throughput: ranked ones first, then those that are not fairly timed."""

    def order(cell: CellResult) -> tuple[bool, bool, bool, float]:
        placement = cell.placement
        emulated = placement.stand_in is not None
        speed = cell.speed.samples_per_second or 0.0
        return not cell.ranked, emulated, placement.oversubscribed, -speed

    return sorted(cells, key=order)


def of_real_things(cells: Sequence[Result]) -> Sequence[Result]:
    return [cell for cell in cells if cell.placement.stand_in is None] or cells


def fairly_timed(cells: Sequence[Result]) -> Sequence[Result]:
    """Returns cells without stand-ins and with a core per rank; ignores what no cell meets."""
    genuine = of_real_things(cells)
    return [cell for cell in genuine if not cell.placement.oversubscribed] or genuine


Choice: TypeAlias = Callable[[Cell], bool]


def baseline_of(cells: Sequence[CellResult], chosen: Choice | None = None) -> CellResult | None:
    """Returns a setting's baseline, if any: the plainest ranked cell that `chosen` accepts.

    By default, this is DDP under torchrun without options, else the single process; on one device
    the single process comes first, as people use no DDP there. Prefers more trials.
    """
    ranked = [cell for cell in cells if cell.ranked]
    if chosen is not None:
        accepted = [result for result in ranked if chosen(result.cell)]
        return min(accepted, key=lambda r: (additions(r.cell), -r.trials), default=None)
    plain = [result for result in ranked if result.cell.plain]
    ddp = [result for result in plain if result.placement.wraps_ddp == "torchrun"]
    single = [r for r in plain if r.cell.strategy == BASELINE and not r.cell.options]
    alone = any(result.cell.devices == 1 for result in single)
    usual = single if alone else ddp or single
    return max(usual, key=lambda result: result.trials, default=None)


def additions(cell: Cell) -> int:
    """Returns the number of options and techniques in the cell's label."""
    named = ("launcher", "checkpoint_from", *TECHNIQUES)
    return len(cell.options) + sum(map(cell.is_set, named))


def with_baselines(cells: Sequence[CellResult], chosen: Choice | None = None) -> list[CellResult]:
    """Adds the id of each ranked cell's baseline."""
    baselines = {
        (cell.cell_id, cell.run_id): baseline.cell_id
        for of_run in grouped(cells, lambda cell: cell.run_id).values()
        for group in by_setting(of_run)
        if (baseline := baseline_of(group, chosen))
        for cell in group
        if cell.ranked
    }

    def named(cell: CellResult) -> CellResult:
        baseline = baselines.get((cell.cell_id, cell.run_id), "")
        relative = dataclasses.replace(cell.relative, baseline=baseline)
        return dataclasses.replace(cell, relative=relative)

    return list(map(named, cells))


def with_efficiencies(cells: Sequence[CellResult]) -> list[CellResult]:
    """Adds scaling efficiencies. Weak scaling compares cells of equal batch per device.
    `efficiency_own` compares with the one-device cell of the same strategy: preferably with as many
    micro-batches, otherwise with equally large ones. `efficiency_single` compares with the single
    process, preferably without options."""
    single_devices: dict[tuple[object, ...], CellResult] = {}
    single: dict[tuple[object, ...], CellResult] = {}
    for cell in cells:
        if cell.ranked and cell.cell.devices == 1 and cell.speed.samples_per_second is not None:
            key = (cell.run_id, *setting(cell.cell, SCALED), cell.cell.global_batch)
            for alike in scaling_series(cell):
                single_devices.setdefault((*key, *alike), cell)
            if cell.cell.strategy == BASELINE and cell.cell.plain:
                single.setdefault(key, cell)
            if cell.cell.strategy == BASELINE and _one_micro_batch(cell.cell).plain:
                single.setdefault((*key, micro_batch(cell)), cell)

    def scaled(cell: CellResult) -> CellResult:
        key = (cell.run_id, *setting(cell.cell, SCALED), batch(cell.cell))
        bases = [
            base for alike in scaling_series(cell) if (base := single_devices.get((*key, *alike)))
        ]
        of_own, own_low, own_high = _efficiency(cell, bases[0] if bases else None)
        plain = single.get(key) or single.get((*key, micro_batch(cell)))
        of_single, single_low, single_high = _efficiency(cell, plain)
        relative = dataclasses.replace(
            cell.relative,
            efficiency_own=of_own,
            efficiency_own_low=own_low,
            efficiency_own_high=own_high,
            efficiency_single=of_single,
            efficiency_single_low=single_low,
            efficiency_single_high=single_high,
        )
        return dataclasses.replace(cell, relative=relative)

    return [scaled(cell) if cell.ranked else cell for cell in cells]


def scaling_series(result: CellResult) -> tuple[tuple[object, ...], ...]:
    """Returns two keys of a cell's scaling curve: by the number of micro-batches, and by their
    size. Prefer the former."""
    cell = result.cell
    return series(cell), (*series(_one_micro_batch(cell)), micro_batch(result))


def _one_micro_batch(cell: Cell) -> Cell:
    return cell.model_copy(update={"micro_batches": 1})


def micro_batch(result: CellResult) -> float:
    """Returns the number of samples in a micro-batch of one data-parallel rank."""
    cell = result.cell
    ranks = result.placement.data_parallel or cell.devices
    return cell.global_batch / ranks / cell.micro_batches


def _efficiency(
    cell: CellResult, base: CellResult | None
) -> tuple[float | None, float | None, float | None]:
    speed, other, devices = cell.speed, base.speed if base else Speed(), cell.cell.devices
    if not other.samples_per_second or speed.samples_per_second is None:
        return None, None, None
    value = efficiency(speed.samples_per_second, devices, other.samples_per_second)
    if cell is base or speed.log_throughput is None or other.log_throughput is None:
        return value, None, None
    ends = ratio(speed.log_throughput, other.log_throughput, CONFIDENCE)
    if ends.low is None or ends.high is None:
        return value, None, None
    return value, ends.low / devices, ends.high / devices
