"""Effects of single features, from pairs of cells that differ in one axis.

`alone`: against the baseline; `together`: mean over all pairs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness.analysis.cell_result import CellResult
from harness.analysis.ranking import baseline_of, compare
from harness.analysis.setting import setting
from harness.analysis.stats import CONFIDENCE, Comparison, LogEstimate, added_level_error, ratio
from harness.cell.cell import TECHNIQUES, Cell


@dataclass(frozen=True)
class Effect:
    """Ratios of cells with a feature to cells without it."""

    axis: str
    value: str
    """Display text such as `recompute=full`."""
    pairs: int
    """Cells with the feature that have a twin without it."""
    alone: Comparison | None
    """Throughput ratio if only this feature is on; None if not measured."""
    alone_memory: float | None
    together: Comparison
    together_memory: float | None


@dataclass(frozen=True)
class Effects:
    baseline: CellResult
    effects: tuple[Effect, ...]
    fastest: CellResult
    smallest: CellResult


Identity = tuple[tuple[str, str], ...]


def axes_of(cell: Cell) -> dict[str, str]:
    own_axis = (*TECHNIQUES, "optimizer")
    off = {name: Cell.model_fields[name].default for name in own_axis}
    return {
        "strategy": cell.model_copy(update=off).label,
        "precision": cell.precision,
        **{name: str(getattr(cell, name)) for name in own_axis},
        "arithmetic": cell.workload.partition("+")[2] or "fp32",
    }


def effects_of(cells: Sequence[CellResult]) -> list[Effects]:
    """Returns effects for settings with features measured both alone and combined."""
    places: dict[tuple[object, ...], list[CellResult]] = {}
    for cell in cells:
        if cell.ranked:
            fixed = setting(cell.cell, ("workload", "precision", "optimizer"))
            base = cell.cell.workload.partition("+")[0]
            places.setdefault((cell.run_id, base, cell.cell.regime, *fixed), []).append(cell)
    found = [
        effects for cells_of_setting in places.values() if (effects := _effects(cells_of_setting))
    ]
    return sorted(found, key=lambda effects: -len(effects.effects))


def _effects(cells: Sequence[CellResult]) -> Effects | None:
    plain = [r for r in cells if "+" not in r.cell.workload and r.cell.precision == "fp32"]
    baseline = baseline_of([result for result in plain if result.cell.optimizer == "adamw"])
    if baseline is None:
        return None
    off = axes_of(baseline.cell)
    by_axes: dict[Identity, CellResult] = {}
    for cell in cells:
        by_axes.setdefault(tuple(axes_of(cell.cell).items()), cell)
    pairs: dict[tuple[str, str], list[tuple[CellResult, CellResult]]] = {}
    for identity, cell in by_axes.items():
        for axis, value in identity:
            if value == off[axis]:
                continue
            without = tuple((a, off[a] if a == axis else v) for a, v in identity)
            if twin := by_axes.get(without):
                pairs.setdefault((axis, value), []).append((cell, twin))
    effects = [_effect(axis, value, twins, baseline) for (axis, value), twins in pairs.items()]
    measured = [effect for effect in effects if effect is not None]
    combined = any(_changes(cell, off) > 1 for cell in cells)
    if not combined or len({effect.axis for effect in measured}) < 2:
        return None
    measured.sort(key=lambda effect: -effect.together.ratio)
    return Effects(
        baseline,
        tuple(measured),
        max(cells, key=lambda cell: cell.speed.samples_per_second or 0.0),
        min(cells, key=lambda cell: cell.memory.peak_memory_bytes or math.inf),
    )


def _changes(cell: CellResult, off: Mapping[str, str]) -> int:
    return sum(value != off[axis] for axis, value in axes_of(cell.cell).items())


def _effect(
    axis: str,
    value: str,
    pairs: Sequence[tuple[CellResult, CellResult]],
    baseline: CellResult,
) -> Effect | None:
    alone = next((pair for pair in pairs if pair[1] is baseline), None)
    together = _mean_ratio(pairs)
    if together is None:
        return None
    return Effect(
        axis,
        value if axis in ("strategy", "arithmetic") else f"{axis}={value}",
        len(pairs),
        compare(*alone, CONFIDENCE) if alone else None,
        _memory_ratio([alone]) if alone else None,
        together,
        _memory_ratio(pairs),
    )


def _mean_ratio(pairs: Sequence[tuple[CellResult, CellResult]]) -> Comparison | None:
    """Returns the geometric mean of the pairs' throughput ratios. Its error is at least the pairs'
    scatter, since effects vary, plus that of the heats' levels. Two pairs are too few for a
    scatter; their interval spans both."""
    speeds = [
        (cell.speed.log_throughput, twin.speed.log_throughput)
        for cell, twin in pairs
        if cell.speed.log_throughput and twin.speed.log_throughput
    ]
    if not speeds:
        return None
    gaps = [enabled.mean - disabled.mean for enabled, disabled in speeds]
    error = math.sqrt(sum(a.whole_error**2 + b.whole_error**2 for a, b in speeds)) / len(speeds)
    scatter = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 2 else 0.0
    degrees = min(estimate.whole_degrees for pair in speeds for estimate in pair)
    if scatter > error:
        degrees = min(degrees, len(gaps) - 1)
    trials = min(estimate.trials for pair in speeds for estimate in pair)
    total = math.hypot(max(error, scatter), added_level_error(speeds, scatter > error))
    effect = LogEstimate(statistics.fmean(gaps), total, degrees, trials)
    mean = ratio(effect, LogEstimate(0.0, 0.0, degrees, trials), CONFIDENCE)
    if len(speeds) != 2:
        return mean
    ratios = [mean, *(ratio(enabled, disabled, CONFIDENCE) for enabled, disabled in speeds)]
    lows = [item.low for item in ratios if item.low is not None]
    highs = [item.high for item in ratios if item.high is not None]
    return replace(mean, low=min(lows, default=None), high=max(highs, default=None))


def _memory_ratio(pairs: Sequence[tuple[CellResult, CellResult]]) -> float | None:
    logs = [
        math.log(cell.memory.peak_memory_bytes / twin.memory.peak_memory_bytes)
        for cell, twin in pairs
        if cell.memory.peak_memory_bytes and twin.memory.peak_memory_bytes
    ]
    return math.exp(statistics.fmean(logs)) if logs else None
