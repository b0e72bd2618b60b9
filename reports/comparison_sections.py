"""Effects of one change: options, launchers around DDP, and variants of a model."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.cell_result import CellResult
from harness.analysis.effects import Effect, Effects, effects_of
from harness.analysis.ranking import compare
from harness.analysis.setting import setting
from harness.analysis.stats import CONFIDENCE, Comparison
from harness.spec.cell import TECHNIQUES
from reports import blocks as ui
from reports.bar_chart import MOST_ROWS, Bar, Bars, first_few, omitted
from reports.blocks import data, phrase, prose
from reports.columns import (
    ReportColumn,
    cell_table,
    figure,
    mebibytes,
    milliseconds,
    numeral,
    throughput_column,
    words,
)
from reports.groups import Group, RankedCell, RankedGroup, by_setting, ranking
from reports.memory_sections import MOST_CHARTS, state_stacks
from reports.names import cell_name, marks, named, workload_name
from reports.speed_sections import throughput_bars
from reports.text import DASH, deviation, exact, number, percent, plain, scaled

MOST_EFFECTS = 2
COLUMNS = (
    "throughput, alone",
    "peak memory, alone",
    "throughput, on average",
    "peak memory, on average",
    "combinations",
)


def title_of(effects: Effects) -> str:
    base = effects.baseline.cell
    return f"{base.workload_name.partition('+')[0]} x{base.devices}, batch {base.global_batch}"


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
    return [
        (
            ratio_text(effect.alone),
            times(effect.alone_memory),
            ratio_text(effect.together),
            times(effect.together_memory),
            str(effect.pairs),
        )
        for effect in effects.effects
    ]


def best_text(effects: Effects) -> str:
    base = effects.baseline
    return (
        f"Fastest: {_combination(effects.fastest)}, {_against(effects.fastest, base)}."
        f" Least memory: {_combination(effects.smallest)}, {_against(effects.smallest, base)}."
    )


def _combination(cell: CellResult) -> str:
    _, plus, suffixes = cell.cell.workload_name.partition("+")
    return f"{named(cell)} in {cell.cell.precision}{plus}{suffixes}"


def _against(cell: CellResult, base: CellResult) -> str:
    words = f"{ratio_text(compare(cell, base, CONFIDENCE))} the throughput"
    peak, base_peak = cell.memory.peak_memory_bytes, base.memory.peak_memory_bytes
    if peak and base_peak:
        words += f" and {number(peak / base_peak)} x the memory"
    return f"{words} of {named(base)} in {base.cell.precision}"


def effect_bars(effects: Effects, name: str) -> Bars:
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
    return _effect_bars(
        name, "Throughput", "throughput with it over without, 95 % interval", bars, effects
    )


def effect_memory_bars(effects: Effects, name: str) -> Bars:
    def size(effect: Effect) -> float:
        return effect.together_memory or 0.0

    known = sorted((e for e in effects.effects if e.together_memory is not None), key=size)
    bars = [
        Bar(e.value, size(e), times(size(e)), strong=size(e) < 1, target=1.0)
        for e in known[:MOST_ROWS]
    ]
    return _effect_bars(name, "Peak memory", "peak memory with it over without", bars, effects)


def _effect_bars(name: str, what: str, axis: str, bars: Sequence[Bar], effects: Effects) -> Bars:
    return Bars(
        name,
        what,
        axis,
        tuple(bars),
        f"{axis}: " + first_few(bars, 8),
        omitted(len(effects.effects)),
    )


def effects_blocks(cells: Sequence[CellResult]) -> ui.Blocks:
    """Returns each option's effect, alone and combined, if options were crossed."""
    found = list(filter(_crossed, effects_of(cells)))[:MOST_EFFECTS]
    parts = [_effects_part(effects, place) for place, effects in enumerate(found)]
    return [ui.Part("", parts, prose("effects"))]


def _crossed(effects: Effects) -> bool:
    """Returns whether options were crossed, not varied one at a time."""
    return 2 * sum(effect.pairs > 1 for effect in effects.effects) > len(effects.effects)


def _effects_part(effects: Effects, place: int) -> ui.Part:
    title, base = title_of(effects), effects.baseline
    bars = (
        effect_bars(effects, f"effects-{place}"),
        effect_memory_bars(effects, f"effects-memory-{place}"),
    )
    rows = [
        ui.Row(data(effect.value), list(map(ui.Td, texts)))
        for effect, texts in zip(effects.effects, rows_of(effects), strict=True)
    ]
    columns = list(map(ui.ColumnHead, COLUMNS))
    table = ui.Table("", f"Effects: {title}", "what is turned on", columns, rows, "compact")
    about = phrase(
        "Baseline: ", cell_name(base), f" in {base.cell.precision}. ", best_text(effects)
    )
    return ui.Part(data(title), [ui.Charts(list(map(ui.Chart, bars))), table], about)


@dataclass(frozen=True)
class Launchers:
    title: str
    cells: tuple[CellResult, ...]
    bars: Bars
    table: ui.Table


def launchers(cells: Sequence[CellResult]) -> list[Launchers]:
    wrapping = [cell for cell in cells if cell.ranked and cell.placement.wraps_ddp is not None]
    groups = by_setting(wrapping, *TECHNIQUES, "regime")
    several = [ranking(group.rows) for group in groups if len(group.rows) > 1]
    return [_launchers(group, f"wrappers-{i}") for i, group in enumerate(several)]


def _launchers(group: RankedGroup, name: str) -> Launchers:
    libraries = Counter(cell.placement.wraps_ddp for cell in group.rows)
    labels = {
        cell.cell_id: f"{cell.placement.wraps_ddp}"
        + (f": {cell.cell.label}" if libraries[cell.placement.wraps_ddp] > 1 else "")
        for cell in group.rows
    }
    cell = group.rows[0].cell
    techniques = [f" · {name}={getattr(cell, name)}" for name in TECHNIQUES if cell.is_set(name)]
    title = group.full_title + "".join(techniques)
    bars = dataclasses.replace(throughput_bars(group, name, labels), title=title)
    label = f"What each wrapper costs, {title}"
    table = cell_table(f"{name}-table", label, group.rows, _launcher_columns(group), "Cell")
    return Launchers(title, group.rows, bars, table)


def _launcher_columns(group: RankedGroup) -> list[ReportColumn[CellResult]]:
    best = step_seconds(group.rows[0])

    def ratio(cell: CellResult) -> ui.Td:
        value = step_seconds(cell) / best
        return numeral(number(value), "step_ratio", value)

    def extra(cell: CellResult) -> ui.Td:
        seconds = step_seconds(cell) - best
        text = "0" if seconds == 0 else scaled(seconds, 1e3)
        shown = ui.Span(text, field="extra_seconds", value=exact(seconds))
        if not isinstance(cell, RankedCell) or not cell.same_as_above:
            return ui.Td(shown)
        return ui.Td([shown, " ≈"], tip="tied with the one above")

    mean = "geometric mean of its trials, relative to the fastest here"
    return [
        ReportColumn("Wrapper", lambda cell: words(f"{cell.placement.wraps_ddp}{marks(cell)}")),
        throughput_column(group.rows),
        milliseconds("Step p50", "step_seconds_p50", "median over the steps"),
        ReportColumn("Step time", ratio, "x fastest", mean),
        ReportColumn("Extra", extra, "ms per step", "beyond the fastest here"),
        figure(
            "Start-up", "startup_seconds", unit="s", tip="until the last rank has imported torch"
        ),
        figure("Set-up", "setup_seconds", unit="s", tip="process group, model, wrapping"),
        mebibytes("Peak memory", "peak_memory_bytes", "fullest device"),
        mebibytes("Library's buffers", "library_bytes", "fullest rank, between steps"),
    ]


def step_seconds(cell: CellResult) -> float:
    return cell.cell.global_batch / (cell.speed.samples_per_second or 1.0)


def launchers_blocks(cells: Sequence[CellResult]) -> ui.Blocks:
    found = launchers(cells)[:MOST_CHARTS]
    charts = ui.Charts([ui.Chart(one.bars) for one in found], prose("wrappers"))
    return [charts, *(ui.Part(data(one.title), [one.table]) for one in found)]


@dataclass(frozen=True)
class Variants:
    title: str
    cells: tuple[CellResult, ...]
    bars: Bars | None
    table: ui.Table


def variants(cells: Sequence[CellResult]) -> list[Variants]:
    """Returns variants (`base+suffix`) by strategy and setting, most first."""
    by_model: dict[tuple[object, ...], list[CellResult]] = {}
    for cell in cells:
        if cell.status == "ok":
            key = (
                _model(cell),
                cell.cell.label,
                cell.cell.regime,
                *setting(cell.cell, without=["workload"]),
            )
            by_model.setdefault(key, []).append(cell)
    kept = [rows for rows in by_model.values() if any(map(_is_variant, rows))]
    kept.sort(key=lambda rows: -len(rows))
    return [_variants(rows, f"variants-{index}") for index, rows in enumerate(kept)]


def _model(cell: CellResult) -> str:
    return cell.cell.workload_name.partition("+")[0]


def _is_variant(cell: CellResult) -> bool:
    return "+" in cell.cell.workload_name


def _variants(cells: Sequence[CellResult], name: str) -> Variants:
    def order(cell: CellResult) -> tuple[bool, int, str]:
        return _is_variant(cell), -(cell.work.trained_parameters or 0), cell.cell.workload_name

    rows = sorted(cells, key=order)
    title = f"{_model(rows[0])} · {rows[0].cell.label} · {Group(tuple(rows)).title}"
    kept, label = "fullest rank, between steps", f"Variants of a model, {title}"
    distance = "largest loss deviation from the same training in fp32"
    columns = [
        figure("Trained", "trained_parameters", plain, "parameters"),
        ReportColumn("Of all", _share),
        mebibytes("Parameters", "parameter_bytes", kept),
        mebibytes("Optimizer", "optimizer_bytes", kept),
        mebibytes("Library", "library_bytes", kept),
        ReportColumn("Sent", _sent, "MiB per step", "by the rank that sends most"),
        mebibytes("Peak memory", "peak_memory_bytes", "fullest device"),
        throughput_column(rows),
        figure("Distance to fp32", "fp32_loss_deviation", deviation, "relative", distance),
    ]
    table = cell_table(f"{name}-table", label, rows, columns, "Workload", workload_name)
    known = [cell for cell in rows if cell.states.state_bytes is not None]
    drawn = state_stacks(known, name, title, _label) if len(known) > 1 else None
    return Variants(title, tuple(rows), drawn, table)


def _label(cell: CellResult) -> str:
    return f"{cell.cell.workload_name}{marks(cell)}"


def trained_share(cell: CellResult) -> float | None:
    if cell.work.trained_parameters is None or not cell.work.parameters:
        return None
    return cell.work.trained_parameters / cell.work.parameters


def _share(cell: CellResult) -> ui.Td:
    share = trained_share(cell)
    if share is None:
        return numeral(DASH, "trained_share", None)
    text = percent(share) if share >= 0.1 else f"{number(share * 100, 2)} %"
    return numeral(text, "trained_share", share)


def _sent(cell: CellResult) -> ui.Td:
    if cell.cell.devices < 2:
        return numeral(DASH, "", None)
    return mebibytes("", "sent_bytes_per_step").make(cell)


def variants_blocks(cells: Sequence[CellResult]) -> ui.Blocks:
    found = variants(cells)[:MOST_CHARTS]
    charts = ui.Charts([ui.Chart(one.bars) for one in found if one.bars], prose("legend states"))
    tables = [ui.Part(data(one.title), [one.table]) for one in found]
    kept = ui.Part("What the fullest rank keeps between steps", [charts])
    return [ui.Part("", tables, prose("variants")), kept]
