"""Effect of each axis on throughput and memory, alone and combined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.cell_result import CellResult
from harness.analysis.effects import Effect, Effects, effects_of
from harness.analysis.ranking import compare
from harness.analysis.stats import CONFIDENCE, Comparison
from reports import lines
from reports.data import MOST_ROWS, Bar, Bars, first_few, rest
from reports.markdown import table
from reports.names import named
from reports.panels import Panel, Panels
from reports.run_report import RunReport
from reports.sections import Paragraphs
from reports.text import DASH, number

COLUMNS = [
    "what is turned on",
    "throughput, alone",
    "peak memory, alone",
    "throughput, on average",
    "peak memory, on average",
    "combinations",
]


@dataclass(frozen=True)
class EffectsPart:
    title: str
    baseline: CellResult
    best: str
    rows: tuple[tuple[str, ...], ...]
    panels: tuple[Panel, ...]


def title_of(effects: Effects) -> str:
    base = effects.baseline.cell
    return f"{base.workload.partition('+')[0]} x{base.devices}, batch {base.global_batch}"


def ratio_text(comparison: Comparison | None) -> str:
    """Returns `1.23 x (1.15 to 1.31)`."""
    if comparison is None:
        return DASH
    if comparison.low is None or comparison.high is None:
        return f"{number(comparison.ratio)} x"
    return f"{number(comparison.ratio)} x ({number(comparison.low)} to {number(comparison.high)})"


def times(value: float | None) -> str:
    return DASH if value is None else f"{number(value)} x"


def rows_of(effects: Effects) -> list[tuple[str, ...]]:
    """Returns a table row for each effect, see COLUMNS."""
    return [
        (
            effect.value,
            ratio_text(effect.alone),
            times(effect.alone_memory),
            ratio_text(effect.together),
            times(effect.together_memory),
            str(effect.pairs),
        )
        for effect in effects.effects
    ]


def best_text(effects: Effects) -> str:
    """Describes the fastest and the most frugal combination, against the baseline."""
    base = effects.baseline
    return (
        f"Fastest: {_combination(effects.fastest)}, {_against(effects.fastest, base)}."
        f" Least memory: {_combination(effects.smallest)}, {_against(effects.smallest, base)}."
    )


def _combination(cell: CellResult) -> str:
    _, plus, suffixes = cell.cell.workload.partition("+")
    return f"{named(cell)} in {cell.cell.precision}{plus}{suffixes}"


def _against(cell: CellResult, base: CellResult) -> str:
    words = f"{ratio_text(compare(cell, base, CONFIDENCE))} the throughput"
    peak, base_peak = cell.memory.peak_memory_bytes, base.memory.peak_memory_bytes
    if peak and base_peak:
        words += f" and {number(peak / base_peak)} x the memory"
    return f"{words} of {named(base)} in {base.cell.precision}"


def throughput_bars(effects: Effects, name: str) -> Bars:
    bars = [
        Bar(
            effect.value,
            effect.together.ratio,
            times(effect.together.ratio),
            effect.together.low,
            effect.together.high,
            strong=effect.together.low is not None and effect.together.low > 1,
            target=1.0,
        )
        for effect in effects.effects[:MOST_ROWS]
    ]
    return _bars(
        name, "Throughput", "throughput with it over without, 95 % interval", bars, effects
    )


def memory_bars(effects: Effects, name: str) -> Bars:
    def size(effect: Effect) -> float:
        return effect.together_memory or 0.0

    known = sorted((e for e in effects.effects if e.together_memory is not None), key=size)
    bars = [
        Bar(e.value, size(e), times(size(e)), strong=size(e) < 1, target=1.0)
        for e in known[:MOST_ROWS]
    ]
    return _bars(name, "Peak memory", "peak memory with it over without", bars, effects)


def _bars(name: str, what: str, axis: str, bars: Sequence[Bar], effects: Effects) -> Bars:
    return Bars(
        name,
        what,
        axis,
        tuple(bars),
        f"{axis}: " + first_few(bars, 8),
        rest(len(effects.effects)),
        target="no effect",
    )


def effects_part(report: RunReport, panels: Panels) -> list[EffectsPart]:
    return [
        EffectsPart(
            title_of(effects),
            effects.baseline,
            best_text(effects),
            tuple(rows_of(effects)),
            (
                panels.written(throughput_bars(effects, f"effects-{place}"), lines.bars),
                panels.written(memory_bars(effects, f"effects-memory-{place}"), lines.bars),
            ),
        )
        for place, effects in enumerate(effects_of(report.cells)[:2])
    ]


def effects_text(report: RunReport) -> Paragraphs:
    paragraphs = []
    for effects in effects_of(report.cells)[:2]:
        paragraphs += [
            f"**{title_of(effects)}**",
            best_text(effects),
            table(COLUMNS, COLUMNS[1:], rows_of(effects)),
        ]
    return paragraphs
