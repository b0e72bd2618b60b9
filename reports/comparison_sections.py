"""Effects of one change: options, launchers around DDP, and variants of a model."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from harness.analysis.cell_result import CellResult
from harness.analysis.effects import Effect, Effects, effects_of
from harness.analysis.ranking import compare
from harness.analysis.setting import setting
from harness.analysis.stats import CONFIDENCE, Comparison
from harness.cell.cell import TECHNIQUES
from harness.cell.errors import plural
from reports import blocks as ui
from reports.bar_chart import Bar, Bars, bars_of
from reports.blocks import data, phrase, prose
from reports.columns import (
    ReportColumn,
    cell_table,
    computed,
    figure,
    in_milliseconds,
    numeral,
    size_column,
    step_seconds,
    step_time_column,
    text_cell,
    throughput_column,
)
from reports.groups import Group, by_setting
from reports.memory_sections import RESERVED, state_stacks
from reports.names import cell_name, dot, marks, named, workload_name
from reports.run_report import RunReport
from reports.sections import MOST_CHARTS
from reports.speed_sections import throughput_bars
from reports.text import DASH, deviation, number, percent, plain

MOST_EFFECTS = 2
COLUMNS = (
    "throughput, alone",
    "peak memory, alone",
    "throughput, on average",
    "peak memory, on average",
    "combinations",
)


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
    text = f"{ratio_text(compare(cell, base, CONFIDENCE))} the throughput"
    peak, base_peak = cell.memory.peak_memory_bytes, base.memory.peak_memory_bytes
    if peak and base_peak:
        text += f" and {number(peak / base_peak)} x the memory"
    return f"{text} of {named(base)} in {base.cell.precision}"


def effect_bars(effects: Effects, name: str) -> list[Bars]:
    """Charts throughput and peak memory with each option over without it, on average."""

    def speed(effect: Effect) -> Bar:
        ratio, low, high = effect.together.ratio, effect.together.low, effect.together.high
        better = low is not None and low > 1
        return Bar(effect.value, ratio, times(ratio), low, high, better, target=1.0)

    def memory(effect: Effect) -> float:
        return effect.together_memory or 0.0

    def bar(effect: Effect) -> Bar:
        size = memory(effect)
        return Bar(effect.value, size, times(size), strong=size < 1, target=1.0)

    measured = [effect for effect in effects.effects if effect.together_memory is not None]
    measured.sort(key=memory)
    axes = (
        "throughput with it over without, 95% interval",
        "peak memory with it over without",
    )
    return [
        bars_of(f"effects-{name}", "Throughput", axes[0], effects.effects, speed, axes[0]),
        bars_of(f"effects-memory-{name}", "Peak memory", axes[1], measured, bar, axes[1]),
    ]


def effects_blocks(cells: Sequence[CellResult]) -> ui.Blocks:
    """Returns each option's effect, alone and combined, if options were crossed."""
    found = [
        effects
        for effects in effects_of(cells)
        # Otherwise options were varied one at a time.
        if 2 * sum(effect.pairs > 1 for effect in effects.effects) > len(effects.effects)
    ]
    parts = [_effects_part(effects, index) for index, effects in enumerate(found[:MOST_EFFECTS])]
    return [ui.Part("", parts, prose("effects"))]


def _effects_part(effects: Effects, index: int) -> ui.Part:
    base = effects.baseline
    model = base.cell.workload_name.partition("+")[0]
    title = f"{model} x{base.cell.devices}, batch {base.cell.global_batch}"
    bars = effect_bars(effects, str(index))
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


def launchers(cells: Sequence[CellResult]) -> list[tuple[str, Group]]:
    """Returns settings that differ only in the wrapper around DDP, with titles."""
    wrapping = [cell for cell in cells if cell.ranked and cell.placement.wraps_ddp is not None]
    groups = by_setting(wrapping, *TECHNIQUES, "regime")
    several = [group for group in groups if len(group.rows) > 1]
    return [(_launchers_title(group), group) for group in several]


def _launchers_title(group: Group) -> str:
    cell = group.rows[0].cell
    techniques = [f" · {name}={getattr(cell, name)}" for name in TECHNIQUES if cell.is_set(name)]
    return group.full_title + "".join(techniques)


def launcher_bars(title: str, group: Group, name: str) -> Bars:
    libraries = Counter(cell.placement.wraps_ddp for cell in group.rows)
    labels = {
        cell.cell_id: f"{cell.placement.wraps_ddp}"
        + (f": {cell.cell.label}" if libraries[cell.placement.wraps_ddp] > 1 else "")
        for cell in group.rows
    }
    return dataclasses.replace(throughput_bars(group, name, labels), title=title)


def launcher_table(title: str, group: Group, name: str) -> ui.Table:
    label = f"What each wrapper costs, {title}"
    return cell_table(name, label, group.rows, _launcher_columns(group), "Cell")


def _launcher_columns(group: Group) -> list[ReportColumn[CellResult]]:
    best = step_seconds(group.rows[0]) or 1.0

    def ratio(cell: CellResult) -> float:
        return (step_seconds(cell) or 0.0) / best

    def extra(cell: CellResult) -> float:
        return (step_seconds(cell) or 0.0) - best

    fullest = "fullest rank, between steps"
    return [
        ReportColumn("Wrapper", lambda cell: text_cell(f"{cell.placement.wraps_ddp}{marks(cell)}")),
        ReportColumn("May be fastest", lambda cell: text_cell(dot(cell)), "", "of all its setting"),
        throughput_column(group.rows),
        step_time_column(),
        computed("Step time", "step_ratio", ratio, unit="x fastest"),
        computed("Extra", "extra_seconds", extra, in_milliseconds, "ms per step"),
        figure(
            "Start-up", "startup_seconds", unit="s", tip="until the last rank has imported torch"
        ),
        figure("Set-up", "setup_seconds", unit="s", tip="process group, model, wrapping"),
        size_column("Peak memory", "peak_memory_bytes", "fullest device"),
        size_column(RESERVED, "library_bytes", fullest),
    ]


def launchers_blocks(report: RunReport) -> ui.Blocks:
    found = list(enumerate(launchers(report.cells)[:MOST_CHARTS]))
    charts = [ui.Chart(launcher_bars(*setting, f"wrappers-{i}")) for i, setting in found]
    tables = [
        ui.Part(data(setting[0]), [launcher_table(*setting, f"wrappers-{i}-table")])
        for i, setting in found
    ]
    return [ui.Charts(charts, prose("wrappers")), *tables]


def launchers_line(report: RunReport) -> str:
    cells = max((group.rows for _, group in launchers(report.cells)), key=len)
    speeds = [cell.speed.samples_per_second or 0.0 for cell in cells]
    most = number(max(speeds) / min(speeds))
    line = f"of {len(cells)} wrappers of DDP, the slowest takes {most} times the"
    return report.unless_most(cells, f"{line} fastest's step")


def variants(cells: Sequence[CellResult]) -> list[list[CellResult]]:
    """Returns models and their variants (`base+suffix`) by strategy and setting, most first."""

    def order(cell: CellResult) -> tuple[bool, int, str]:
        return _is_variant(cell), -(cell.work.trained_parameters or 0), cell.cell.workload_name

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
    varied = [rows for rows in by_model.values() if any(map(_is_variant, rows))]
    return [sorted(rows, key=order) for rows in sorted(varied, key=lambda rows: -len(rows))]


def _model(cell: CellResult) -> str:
    return cell.cell.workload_name.partition("+")[0]


def _is_variant(cell: CellResult) -> bool:
    return "+" in cell.cell.workload_name


def variants_title(rows: Sequence[CellResult]) -> str:
    return f"{_model(rows[0])} · {rows[0].cell.label} · {Group(tuple(rows)).title}"


def variants_table(rows: Sequence[CellResult], name: str) -> ui.Table:
    fullest = "fullest rank, between steps"
    distance = "largest loss deviation from the same training in fp32"
    columns = [
        figure("Trained", "trained_parameters", plain, "parameters"),
        ReportColumn("Of all", _share),
        size_column("Parameters", "parameter_bytes", fullest),
        size_column("Optimizer", "optimizer_bytes", fullest),
        size_column(RESERVED, "library_bytes", fullest),
        ReportColumn("Sent", _sent, "MiB per step", "by the rank that sends most"),
        size_column("Peak memory", "peak_memory_bytes", "fullest device"),
        throughput_column(rows),
        figure("Distance to fp32", "fp32_loss_deviation", deviation, "relative", distance),
    ]
    label = f"Variants of a model, {variants_title(rows)}"
    return cell_table(name, label, rows, columns, "Workload", workload_name)


def variants_bars(rows: Sequence[CellResult], name: str) -> Bars | None:
    measured = [cell for cell in rows if cell.states.state_bytes is not None]
    if len(measured) < 2:
        return None
    return state_stacks(measured, name, variants_title(rows), _label)


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
    text = percent(share) if share >= 0.1 else f"{number(share * 100, 2)}%"
    return numeral(text, "trained_share", share)


def _sent(cell: CellResult) -> ui.Td:
    if cell.cell.devices < 2:
        return numeral(DASH, "", None)
    return size_column("", "sent_bytes_per_step").make(cell)


def variants_blocks(report: RunReport) -> ui.Blocks:
    found = list(enumerate(variants(report.cells)[:MOST_CHARTS]))
    drawn = [bars for i, rows in found if (bars := variants_bars(rows, f"variants-{i}"))]
    tables = [
        ui.Part(data(variants_title(rows)), [variants_table(rows, f"variants-{i}-table")])
        for i, rows in found
    ]
    charts = ui.Charts(list(map(ui.Chart, drawn)), prose("legend states"))
    states = ui.Part("What the fullest rank keeps between steps", [charts])
    return [ui.Part("", tables, prose("variants")), states]


def variants_line(report: RunReport) -> str:
    cells = [cell for rows in variants(report.cells) for cell in rows]
    shares = [share for cell in cells if (share := trained_share(cell))]
    least = f"; the smallest trains {100 * min(shares):.2g}% of the parameters" if shares else ""
    return report.unless_most(cells, f"{plural(len(cells), 'variant')} compared{least}")
