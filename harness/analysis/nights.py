"""Judges a night by the good nights before it, and predicts which slowdowns nights find."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from harness.analysis.compare import ComparedCell, RunComparison, compare_sides
from harness.analysis.selection import MeasuredCell, RunSelection
from harness.analysis.setting import grouped
from harness.analysis.stats import SMALLEST_EFFECT, comparison

ALARMS_A_YEAR = 1
"""Expected number of false alarms in 365 nights over all cells of a matrix."""
MOST_NIGHTS = 30
"""Number of good nights that a night is compared with: the newest."""
BETWEEN_NIGHTS = {"cpu": 0.01, "cuda": 0.004}
"""Assumed standard deviation of a cell's log throughput between nights, without the noise of
trials. Recorded nights replace it bit by bit."""
ASSUMED_DEGREES = 20.0
"""Degrees of freedom that the assumed variance gets in the pooled one, and the pooled one in a
cell's."""
FOUND = 0.95
"""Probability of finding the smallest slowdown that is stated."""
METHOD = (
    "a night's log throughput minus the mean of the good nights before it, adjusted by the control."
    " The error is the standard deviation between nights, moderated over all cells (Smyth,"
    " Statistical Applications in Genetics and Molecular Biology 3, 2004). A cell is slower if one"
    " night shows it clearly, or two nights in a row show it less clearly. The limits allow"
    f" {ALARMS_A_YEAR} false alarm a year over all cells"
)


def rates(cells: int) -> tuple[float, float]:
    """Returns the one-sided error rates of a slowdown that one night shows, and of one that two
    nights in a row show. Both and slow drift get a third of the false alarms each."""
    share = ALARMS_A_YEAR / 365 / max(1, cells) / 3
    return share, math.sqrt(share)


@dataclass(frozen=True)
class _Change:
    log_ratio: float
    """Tonight's log throughput minus the mean of the nights."""
    nights: tuple[float, ...]
    """Log throughput of each night minus their mean."""
    variance: float
    """Variance of a night by the scatter of its trials, and between nights as assumed."""

    @property
    def squares(self) -> float:
        return sum(log**2 for log in self.nights)


def judged(
    last: RunSelection,
    tonight: RunSelection,
    nights: Sequence[MeasuredCell],
    suspected: Collection[str] = (),
) -> tuple[RunComparison, list[ComparedCell]]:
    """Compares a night with the last good night, and its throughputs with those of all good nights.
    Also returns the cells that are slower if the next night shows it too. `suspected`: ids of such
    cells of the night before. Raises UsageError without a common cell."""
    from scipy.special import stdtr, stdtrit

    compared = compare_sides(last, tonight)
    same_torch = last.software.get("torch") == tonight.software.get("torch")
    before = grouped(nights, lambda cell: cell.cell_id)
    changes = {
        cell.cell_id: change
        for line in compared.lines
        if line.throughput and (cell := line.second)
        if (change := _change(cell, before[cell.cell_id], same_torch))
    }
    alone, twice = rates(len(changes))
    lines, suspects = [], []
    for line in compared.lines:
        cell_id = line.second.cell_id if line.second else ""
        if not line.throughput or cell_id not in changes:
            lines.append(line)
            continue
        log_ratio = changes[cell_id].log_ratio
        error, degrees = _error(changes, cell_id)
        seems_slower = log_ratio <= math.log1p(-SMALLEST_EFFECT)
        seems_slower &= bool(stdtr(degrees, log_ratio / error) < twice)
        half = -error * float(
            stdtrit(degrees, twice if seems_slower and cell_id in suspected else alone)
        )
        speed = comparison(log_ratio, half, len(changes[cell_id].nights))
        lines.append(dataclasses.replace(line, throughput=speed, kind=speed.verdict))
        suspects += lines[-1:] if seems_slower and speed.verdict != "slower" else []
    first = f"{len({cell.run_id for cell in nights})} good nights, the last {last.name}"
    confidence = 1 - 2 * alone
    return (
        RunComparison(
            first, compared.second, tuple(lines), METHOD, compared.differences, confidence
        ),
        suspects,
    )


def _change(
    tonight: MeasuredCell, nights: Sequence[MeasuredCell], same_torch: bool = True
) -> _Change | None:
    """Returns the change from the mean of the nights; None without an earlier night.

    Without `same_torch`, the control changed too. Then the smaller of the changes with and without
    its adjustment counts.
    """
    cells = [*(cell for cell in nights if cell.ok and cell.comparable(tonight)), tonight]
    speeds = [speed for cell in cells if (speed := cell.result.speed.log_throughput)]
    if len(speeds) < 2:
        return None
    plain = [speed.mean for speed in speeds]
    chosen = plain
    if all(speed.control is not None and speed.adjusted for speed in speeds):
        chosen = [speed.mean + (speed.control or 0.0) for speed in speeds]
        if not same_torch:
            chosen = min(
                chosen, plain, key=lambda logs: abs(logs[-1] - statistics.fmean(logs[:-1]))
            )
    *before, now = chosen
    mean = statistics.fmean(before)
    of_trials = statistics.fmean(speed.error**2 + speed.level_error**2 for speed in speeds)
    variance = of_trials + BETWEEN_NIGHTS[tonight.cell.device] ** 2
    return _Change(now - mean, tuple(log - mean for log in before), variance)


def _error(changes: Mapping[str, _Change], cell_id: str) -> tuple[float, float]:
    """Returns the standard error of a cell's log ratio, and its degrees of freedom."""
    change, every = changes[cell_id], changes.values()
    freedom = sum(len(cell.nights) - 1 for cell in every)
    pooled = ASSUMED_DEGREES * change.variance + sum(cell.squares for cell in every)
    pooled /= ASSUMED_DEGREES + freedom
    degrees = ASSUMED_DEGREES + len(change.nights) - 1
    variance = (ASSUMED_DEGREES * pooled + change.squares) / degrees
    return math.sqrt(variance * (1 + 1 / len(change.nights))), degrees


def where(line: ComparedCell) -> str:
    """Returns a cell's nodes, such as ` on n17, before on n3`; empty if it did not run."""
    now, then = (
        ", ".join(side.result.placement.nodes or (side.hardware.host,)) if side else ""
        for side in (line.second, line.first)
    )
    return (f" on {now}" if now else "") + (f", before on {then}" if then and then != now else "")


@dataclass(frozen=True)
class Noise:
    """Recorded noise of log throughputs on one host."""

    trials: tuple[float, ...]
    """Deviations of trials from their cells' means."""
    between_nights: float
    """Standard deviation between nights, without the noise of trials."""


def recorded_noise(cells: Sequence[MeasuredCell]) -> Noise | None:
    """Returns the noise of some runs; None without a cell that has two trials."""
    ok = [cell for cell in cells if cell.ok and len(cell.result.speed.by_round) > 1]
    deviations: list[float] = []
    for cell in ok:
        logs = [math.log(speed) for speed in cell.result.speed.by_round.values()]
        scale, mean = math.sqrt(len(logs) / (len(logs) - 1)), statistics.fmean(logs)
        deviations += [scale * (log - mean) for log in logs]
    if not deviations:
        return None
    by_cell = grouped(ok, lambda cell: cell.cell_id).values()
    changes = [change for every in by_cell if (change := _change(every[-1], every[:-1]))]
    assumed = BETWEEN_NIGHTS[ok[-1].cell.device] ** 2
    freedom = ASSUMED_DEGREES + sum(len(change.nights) - 1 for change in changes)
    excess = sum(c.squares - (len(c.nights) - 1) * (c.variance - assumed) for c in changes)
    return Noise(
        tuple(deviations),
        math.sqrt(max(0.0, ASSUMED_DEGREES * assumed + excess) / freedom),
    )


def smallest_slowdown(noise: Noise, trials: int, cells: int, nights: int = 5) -> float:
    """Returns the relative slowdown that is found within two nights with probability FOUND, by
    resampling recorded trials. `trials`: of each cell and night; `nights`: good nights before."""
    import numpy as np
    from scipy.special import stdtrit

    chance = np.random.default_rng(1)
    drawn = chance.choice(np.asarray(noise.trials), (4000, nights + 2, trials)).mean(axis=2)
    drawn += chance.normal(0.0, noise.between_nights, drawn.shape)
    error = math.hypot(np.std(noise.trials) / math.sqrt(trials), noise.between_nights)
    error *= math.sqrt(1 + 1 / nights)
    alone, twice = (-error * stdtrit(ASSUMED_DEGREES + nights - 1, rate) for rate in rates(cells))
    missing = drawn[:, nights:] - drawn[:, :nights].mean(axis=1)[:, None]
    needed = np.minimum((missing + alone).min(axis=1), (missing + twice).max(axis=1))
    return -math.expm1(-float(np.quantile(needed, FOUND)))


def power_sentence(noise: Noise, trials: int, cells: int) -> str:
    return (
        f"with {trials} trials of each of {cells} cells, a slowdown of"
        f" {100 * smallest_slowdown(noise, trials, cells):.1f}% is found within two nights with"
        f" {100 * FOUND:.0f}%, at {ALARMS_A_YEAR} false alarm a year over all cells (recorded"
        f" noise: {100 * statistics.pstdev(noise.trials):.1f}% of a trial,"
        f" {100 * noise.between_nights:.1f}% between nights)"
    )
