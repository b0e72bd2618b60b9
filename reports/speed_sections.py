from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from harness.analysis.cell_result import CellResult
from harness.analysis.ranking import micro_batch, scaling_series
from harness.analysis.setting import SCALED, batch, setting
from harness.cell.errors import plural
from reports import blocks as ui
from reports.bar_chart import MOST_ROWS, Bar, Bars, bars_of, omitted
from reports.blocks import data, prose
from reports.columns import (
    ReportColumn,
    figure,
    mebibytes,
    milliseconds,
    table_of,
    with_interval,
    word,
    words,
)
from reports.groups import RankedCell, RankedGroup, pareto
from reports.line_chart import Line, Point, Scaling, Scatter
from reports.names import (
    INEXACT,
    NOT_THE_SAME,
    NOTES,
    TIED,
    disturbance_legend,
    marks,
    named,
    notes_for,
    unit,
)
from reports.run_report import RunReport
from reports.sections import MOST_CHARTS, Numbers, Panel
from reports.text import DASH, MIB, exact, number, percent, plain

MOST_SHOWN = 16
MOST_SCALING = 4


def throughput_bars(
    group: RankedGroup,
    name: str,
    labels: Mapping[str, str] | None = None,
    cells: Sequence[RankedCell] = (),
) -> Bars:
    """Charts throughput with 95% intervals; bars of advised or tied cells are strong.

    `labels`: by cell id. `cells`: by default all, fastest first.
    """
    cells_shown = cells or group.rows[:MOST_ROWS]
    baseline = next((c for c in group.rows if c.relative.baseline == c.cell_id), None)
    level = group.rate(baseline).value if baseline else None

    def bar(cell: RankedCell) -> Bar:
        rate = group.rate(cell)
        spread = "" if rate.half_width is None else f" ± {number(rate.half_width, 2)}"
        label = named(cell, place=False, label=(labels or {}).get(cell.cell_id, ""))
        return Bar(
            label + ("" if cell.parity.same_training else INEXACT),
            rate.value,
            number(rate.value) + spread,
            rate.low,
            rate.high,
            cell.cell_id in group.may_be_fastest,
            marks(cell),
            level,
        )

    notes = [f"upright line: {baseline.cell.label}, the baseline"] if baseline else []
    notes += [] if all(cell.parity.same_training for cell in cells_shown) else [NOT_THE_SAME]
    return bars_of(
        name,
        group.title,
        f"throughput ({group.unit}), 95% interval",
        cells_shown,
        bar,
        f"Throughput of {plural(len(group.rows), 'cell')} in {group.unit}, {group.title}, fastest"
        " first",
        (*notes, *notes_for(cells_shown), *omitted(len(group.rows), len(cells_shown))),
    )


def memory_bars(group: RankedGroup, name: str, cells: Sequence[RankedCell] = ()) -> Bars | None:
    """Charts peak memory in MiB with its range. `cells`: by default all."""
    measured = [cell for cell in group.rows if cell.memory.peak_memory_bytes is not None]
    if not measured:
        return None
    measured.sort(key=_peak)
    least = _peak(measured[0])
    cells_shown = cells or measured[:MOST_ROWS]

    def bar(cell: RankedCell) -> Bar:
        label, value = named(cell, place=False), _peak(cell)
        if cell.memory.peak_memory_bytes is None:
            return Bar(label, None, DASH)
        low = (cell.memory.peak_memory_bytes_low or 0) / MIB
        ends = (low if cell.trials > 1 else None, value)
        return Bar(label, value, number(value), *ends, low <= least, marks(cell))

    return bars_of(
        name,
        group.title,
        "peak memory of the fullest device (MiB), range over trials",
        cells_shown,
        bar,
        f"Peak memory of {plural(len(cells_shown), 'cell')} in MiB, {group.title}",
        (*notes_for(cells_shown), *omitted(len(measured), len(cells_shown))),
    )


def _peak(cell: RankedCell) -> float:
    return (cell.memory.peak_memory_bytes or 0) / MIB


def memory_scatter(group: RankedGroup, name: str) -> Scatter | None:
    """Charts throughput over memory; None if fewer than three cells have measured memory."""
    front = {cell.cell_id: position for position, cell in enumerate(pareto(group), 1)}
    cells = [cell for cell in group.rows if cell.memory.peak_memory_bytes is not None]
    if len(cells) < 3:
        return None
    points = []
    for cell in cells:
        rate = group.rate(cell)
        points.append(
            Point(
                named(cell, place=False),
                (cell.memory.peak_memory_bytes or 0) / MIB,
                (cell.memory.peak_memory_bytes_low or 0) / MIB,
                rate.value,
                rate.low,
                rate.high,
                marks(cell),
                front.get(cell.cell_id),
            )
        )
    text = "; ".join(
        f"{p.label} {number(p.throughput)} {group.unit} in {number(p.memory)} MiB"
        for p in points
        if p.place
    )
    summary = (
        f"Peak memory against throughput, {group.title}. No other cell is better in both than:"
        f" {text}"
    )
    return Scatter(
        name, group.title, group.unit, tuple(points), summary, notes_for(cells, "hollow")
    )


def comparable(report: RunReport) -> list[tuple[int, RankedGroup, str]]:
    several = [group for group in report.groups if len(group.rows) > 1][:MOST_CHARTS]
    main = report.groups[0].workload if several else ""
    return [(index, group, group.short_title(main)) for index, group in enumerate(several)]


def ranking_blocks(report: RunReport) -> ui.Blocks:
    """Returns charts of the verdict's setting, or ranked tables in Markdown."""
    tables: ui.Blocks = []
    for group in report.groups:
        tables += [ui.Heading(data(group.full_title)), _ranked_table(group)]
    cells = [cell for group in report.groups for cell in group.rows]
    names = "".join(map(named, cells))
    notes = [NOTES[mark].replace(" hatched:", "") for mark in NOTES if mark in names]
    notes += [TIED] if any(cell.same_as_above for cell in cells) else []
    if meaning := disturbance_legend(cells):
        notes.append(f"¶ {meaning}")
    return [
        _headline_charts(report.leading),
        ui.Only("text", [*tables, *(ui.Paragraph(f"{note}.") for note in notes)]),
    ]


def _headline_charts(group: RankedGroup | None) -> ui.Charts:
    if group is None or len(group.rows) < 2:
        return ui.Charts([])
    advised = group.advised
    roles = {advice.cell.cell_id for advice in advised.advice} if advised else set()
    roles |= {group.rows[0].relative.baseline}
    first, later = group.rows[:MOST_SHOWN], group.rows[MOST_SHOWN:]
    more = [cell for cell in later if cell.cell_id in roles]
    cells = [*first[: MOST_SHOWN - len(more)], *more]
    charts = [ui.Chart(throughput_bars(group, "speed", cells=cells), "Throughput")]
    if memory := memory_bars(group, "memory-of-these", cells):
        charts.append(ui.Chart(memory, "Peak memory"))
    return ui.Charts(charts, prose("headline"))


def _ranked_table(group: RankedGroup) -> ui.Table:
    def interval(cell: CellResult) -> ui.Td:
        rate = group.rate(cell)
        ends = f"{number(rate.low)} to {number(rate.high)}"
        return ui.Td("1 trial: no interval" if rate.low is None else ends)

    columns: list[ReportColumn[CellResult]] = [
        ReportColumn("strategy", lambda cell: words(named(cell))),
        figure("throughput", group.throughput, unit=group.unit),
        ReportColumn("95% interval", interval),
        milliseconds("step p50", "step_seconds_p50"),
        mebibytes("peak memory", "peak_memory_bytes"),
        word("parity", "parity_verdict"),
    ]

    def place(cell: RankedCell) -> str:
        return f"{cell.place}{f' ≈ {cell.place - 1}' if cell.same_as_above else ''}"

    rows = [ui.Row(place(cell), [column.make(cell) for column in columns]) for cell in group.rows]
    return table_of("", group.full_title, "place", columns, rows)


def memory_charts(report: RunReport) -> Iterator[ui.Chart]:
    for index, group, title in comparable(report):
        if bars := memory_bars(group, f"memory-{index}"):
            yield ui.Chart(bars, title)


def memory_line(report: RunReport) -> str:
    return report.from_to(lambda cell: cell.memory.peak_memory_bytes, "MiB", 1 / MIB)


def front_charts(report: RunReport) -> Iterator[ui.Chart]:
    for index, group, title in comparable(report):
        if scatter := memory_scatter(group, f"front-{index}"):
            names = tuple(
                f"{point.label}: {number(point.throughput)} {scatter.unit},"
                f" {number(point.memory)} MiB"
                for point in scatter.front
            )
            yield ui.Chart(scatter, title, names)


def front_line(report: RunReport) -> str:
    best = pareto(report.leading) if report.leading else []
    return f"{plural(len(best), 'cell')} that no other cell beats in both"


Curve = list[CellResult]
"""A strategy's cells in one setting, by number of devices."""


def scaling(cells: Sequence[CellResult], regime: str) -> list[Scaling]:
    figures: dict[tuple[object, ...], list[Curve]] = {}
    for curve in _curves(cells, regime):
        shared = (*setting(curve[0].cell, SCALED), batch(curve[0].cell, regime))
        figures.setdefault(shared, []).append(curve)
    largest_first = sorted(figures.values(), key=lambda curves: -len(curves))
    return [_scaling(f"{regime}-{i}", regime, curves) for i, curves in enumerate(largest_first)]


def _curves(cells: Sequence[CellResult], regime: str) -> list[Curve]:
    """Joins cells with equally many micro-batches, and of the remaining cells those with equally
    large micro-batches."""
    as_many: dict[tuple[object, ...], dict[int, CellResult]] = {}
    as_large: dict[tuple[object, ...], dict[int, CellResult]] = {}
    # If cells have the same number of devices, the one on the fewest nodes is drawn.
    for cell in sorted(cells, key=lambda cell: cell.cell.nodes):
        # Regimes coincide on one device.
        fits = cell.cell.regime == regime or cell.cell.devices == 1
        if cell.ranked and fits and not cell.cell.links:
            shared = (*setting(cell.cell, SCALED), batch(cell.cell, regime))
            for curves, alike in zip((as_many, as_large), scaling_series(cell), strict=True):
                curves.setdefault((*shared, *alike), {}).setdefault(cell.cell.devices, cell)
    drawn: set[str] = set()
    joined: list[Curve] = []
    for by_devices in (*as_many.values(), *as_large.values()):
        curve = [by_devices[devices] for devices in sorted(by_devices)]
        ids = {cell.cell_id for cell in curve}
        if len(curve) > 1 and not ids <= drawn:
            joined.append(curve)
            drawn |= ids
    return joined


def _scaling(name: str, regime: str, curves: Sequence[Curve]) -> Scaling:
    flat = [cell for curve in curves for cell in curve]
    tokens = all(cell.speed.tokens_per_second is not None for cell in flat)
    column = "tokens_per_second" if tokens else "samples_per_second"
    lines = [_line(curve, column) for curve in curves]
    lines.sort(key=lambda line: (-line.x[-1], -line.values[-1]))
    start = min(line.x[0] for line in lines)
    base = max(line.values[0] for line in lines if line.x[0] == start)
    counts = sorted({n for line in lines for n in line.x})
    title = _scaling_title(flat[0], regime)
    text = "; ".join(f"{line.summary} {unit(column)}" for line in lines[:6])
    return Scaling(
        name,
        title,
        unit(column),
        tuple(lines),
        tuple((n, base * n / start) for n in counts),
        f"{title}, {plural(len(lines), 'line')} over {counts[0]} to {counts[-1]} devices: {text}",
        notes_for(flat, "hollow"),
    )


def _line(curve: Curve, column: str) -> Line:
    rates = [rate for cell in curve if (rate := cell.throughput(column))]
    # The label omits nodes, which may vary along a curve, and the regime, which the title has.
    last = curve[-1].varied(nodes=1, regime="strong")
    label = ""
    if len({cell.cell.micro_batches for cell in curve}) > 1:
        last = last.varied(micro_batches=1)
        samples = plural(round(micro_batch(curve[-1])), "sample")
        label = f"{last.cell.label} · micro-batches of {samples}"
    return Line(
        named(last, label=label),
        tuple(cell.cell.devices for cell in curve),
        tuple(rate.value for rate in rates),
        tuple(rate.low for rate in rates),
        tuple(rate.high for rate in rates),
        any(marks(cell) for cell in curve),
    )


def _scaling_title(cell: CellResult, regime: str) -> str:
    size = batch(cell.cell, regime)
    held = f"batch {size} in all" if regime == "strong" else f"batch {size} per device"
    parts = [f"{regime.capitalize()} scaling", cell.cell.workload_name, cell.cell.precision, held]
    if cell.cell.optimizer != "adamw":
        parts.append(cell.cell.optimizer)
    return " · ".join(parts)


def scaling_charts(report: RunReport) -> list[Scaling]:
    return [
        curves
        for regime in ("strong", "weak")
        for curves in scaling(report.cells, regime)[:MOST_SCALING]
    ]


def scaled_cells(report: RunReport) -> list[CellResult]:
    def order(cell: CellResult) -> tuple[str, int, float]:
        own = cell.relative.efficiency_own
        return cell.cell.workload_name, cell.cell.devices, -(-1.0 if own is None else own)

    scaled = [
        cell
        for cell in report.cells
        if cell.cell.devices > 1
        and (
            cell.relative.efficiency_own is not None or cell.relative.efficiency_single is not None
        )
    ]
    return sorted(scaled, key=order)


def _efficiency(report: RunReport) -> ui.Blocks:
    cells = scaled_cells(report)
    shares = [c.relative.efficiency_single for c in cells if c.relative.efficiency_single]
    best = f", at best {percent(max(shares))} of linear" if shares else ""
    title = f"Scaling efficiency of {plural(len(cells), 'cell')}{best}"
    return dataclasses.replace(EFFICIENCY, folded=title).blocks(report)


def batch_column() -> ReportColumn[CellResult]:
    def make(cell: CellResult) -> ui.Td:
        value = cell.cell.global_batch
        size = ui.Span(plain(value), field="global_batch", value=exact(value))
        return ui.Td([size, " weak"] if cell.cell.regime == "weak" else size)

    return ReportColumn("Batch", make, "samples", "global batch")


_ON_ONE = "on one device, 95% interval"
EFFICIENCY: Numbers[RunReport] = Numbers(
    "efficiency",
    "Scaling efficiency",
    scaled_cells,
    lambda _: [
        word("Scaling", "regime"),
        word("Precision", "precision"),
        batch_column(),
        ReportColumn("Against itself", with_interval("efficiency_own"), _ON_ONE),
        ReportColumn("Against the plain process", with_interval("efficiency_single"), _ON_ONE),
    ],
    note="efficiency",
)
SCALING_PANELS: tuple[Panel[RunReport], ...] = (Panel(scaling_charts, "scaling", more=_efficiency),)
