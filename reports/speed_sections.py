from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from harness.analysis.cell_result import CellResult
from harness.analysis.ranking import micro_batch, scaling_series
from harness.analysis.setting import SCALED, batch, setting
from harness.cell.errors import plural
from reports import blocks as ui
from reports.bar_chart import MOST_ROWS, Bar, Bars, bars_of, omitted, with_headings
from reports.blocks import data, prose
from reports.columns import (
    ReportColumn,
    figure,
    size_column,
    step_time_column,
    table_of,
    text_cell,
    with_interval,
    word,
)
from reports.groups import Group, pareto
from reports.line_chart import Line, Point, Scaling, Scatter
from reports.names import (
    INEXACT,
    MAY_BE_FASTEST,
    NOT_RANKED,
    NOT_THE_SAME,
    NOTES,
    disturbance_legend,
    dot,
    marks,
    named,
    names_apart,
    notes_for,
    titles_apart,
    unit,
)
from reports.run_report import RunReport
from reports.sections import MOST_CHARTS, Numbers, Panel
from reports.text import DASH, memory_unit, number, percent, plain, size

MOST_SHOWN = 16
MOST_UNRANKED = 2
MOST_SCALING = 4


def throughput_bars(
    group: Group,
    name: str,
    labels: Mapping[str, str] | None = None,
    cells: Sequence[CellResult] = (),
) -> Bars:
    """Charts throughput with 95% intervals; bars of cells that may be the fastest are strong.

    `labels`: by cell id. `cells`: by default all, fastest first.
    """
    cells_shown, names = cells or group.rows[:MOST_ROWS], names_apart(group.rows)
    baseline = next((c for c in group.rows if c.relative.baseline == c.cell_id), None)
    level = group.rate(baseline).value if baseline else None

    def bar(cell: CellResult) -> Bar:
        rate = group.rate(cell)
        ends = "" if rate.low is None else f" ({number(rate.low)} to {number(rate.high)})"
        label = named(cell, place=False, label=labels[cell.cell_id]) if labels else ""
        return Bar(
            (label or names[cell.cell_id]) + ("" if cell.parity.same_training else INEXACT),
            rate.value,
            number(rate.value) + ends,
            rate.low,
            rate.high,
            cell.relative.may_be_fastest,
            marks(cell),
            level,
        )

    notes = [f"upright line: {baseline.cell.label}, the baseline"] if baseline else []
    notes += [] if all(cell.parity.same_training for cell in cells_shown) else [NOT_THE_SAME]
    return bars_of(
        name,
        group.title,
        f"throughput ({group.unit}), 95% interval",
        _ranked_apart(cells_shown),
        with_headings(bar),
        f"Throughput of {plural(len(group.rows), 'cell')} in {group.unit}, {group.title}, fastest"
        " first",
        (*notes, *notes_for(cells_shown), *omitted(len(group.rows), len(cells_shown))),
        MOST_ROWS + 1,
    )


def _ranked_apart(cells: Sequence[CellResult]) -> list[CellResult | str]:
    """Puts cells without a place below the others, under a heading."""
    placed = [cell for cell in cells if cell.relative.place is not None]
    others = [cell for cell in cells if cell.relative.place is None]
    return [*placed, *([NOT_RANKED] if placed and others else []), *others]


def memory_bars(group: Group, name: str, cells: Sequence[CellResult] = ()) -> Bars | None:
    """Charts peak memory with its range. `cells`: by default all."""
    measured = [cell for cell in group.rows if cell.memory.peak_memory_bytes is not None]
    if not measured:
        return None
    measured.sort(key=lambda cell: (cell.relative.place is None, _peak(cell)))
    least, (factor, unit_) = _peak(measured[0]), memory_unit(map(_peak, measured))
    cells_shown, names = cells or measured[:MOST_ROWS], names_apart(group.rows)

    def bar(cell: CellResult) -> Bar:
        label, value = names[cell.cell_id], _peak(cell) / factor
        if cell.memory.peak_memory_bytes is None:
            return Bar(label, None, DASH)
        low = cell.memory.peak_memory_bytes_low or 0
        ends = (low / factor if cell.trials > 1 else None, value)
        frugal = low <= least and cell.relative.place is not None
        return Bar(label, value, number(value), *ends, frugal, marks(cell))

    return bars_of(
        name,
        group.title,
        f"peak memory of the fullest device ({unit_}), range over trials",
        _ranked_apart(cells_shown),
        with_headings(bar),
        f"Peak memory of {plural(len(cells_shown), 'cell')} in {unit_}, {group.title}",
        (*notes_for(cells_shown), *omitted(len(measured), len(cells_shown))),
        MOST_ROWS + 1,
    )


def _peak(cell: CellResult) -> float:
    return cell.memory.peak_memory_bytes or 0


def memory_scatter(group: Group, name: str) -> Scatter | None:
    """Charts throughput over memory; None if fewer than three cells have measured memory."""
    front = {cell.cell_id: position for position, cell in enumerate(pareto(group), 1)}
    cells = [cell for cell in group.rows if cell.memory.peak_memory_bytes is not None]
    if len(cells) < 3:
        return None
    (factor, unit_), names = memory_unit(map(_peak, cells)), names_apart(group.rows)
    points = []
    for cell in cells:
        rate = group.rate(cell)
        points.append(
            Point(
                names[cell.cell_id],
                _peak(cell) / factor,
                (cell.memory.peak_memory_bytes_low or 0) / factor,
                rate.value,
                rate.low,
                rate.high,
                marks(cell),
                front.get(cell.cell_id),
            )
        )
    text = "; ".join(
        f"{p.label} {number(p.throughput)} {group.unit} in {number(p.memory)} {unit_}"
        for p in points
        if p.place
    )
    summary = (
        f"Peak memory against throughput, {group.title}. No other cell is better in both than:"
        f" {text}"
    )
    return Scatter(
        name, group.title, group.unit, unit_, tuple(points), summary, notes_for(cells, "hollow")
    )


def comparable(report: RunReport) -> list[tuple[int, Group, str]]:
    several = [group for group in report.groups if len(group.rows) > 1][:MOST_CHARTS]
    main = report.groups[0].workload if several else ""
    titles = [group.short_title(main) for group in several]
    titles = titles_apart(titles, [group.rows[0] for group in several])
    return list(zip(range(len(several)), several, titles, strict=True))


def ranking_blocks(report: RunReport) -> ui.Blocks:
    """Returns charts of the verdict's setting, or ranked tables in Markdown."""
    tables: ui.Blocks = []
    for group in report.groups:
        tables += [ui.Heading(data(group.full_title)), _ranked_table(group)]
    cells = [cell for group in report.groups for cell in group.rows]
    names = "".join(map(named, cells))
    notes = [NOTES[mark].replace(" hatched:", "") for mark in NOTES if mark in names]
    notes += [MAY_BE_FASTEST] if cells else []
    if meaning := disturbance_legend(cells):
        notes.append(f"¶ {meaning}")
    return [
        _headline_charts(report.leading),
        ui.Only("text", [*tables, *(ui.Paragraph(f"{note}.") for note in notes)]),
    ]


def _headline_charts(group: Group | None) -> ui.Charts:
    if group is None or len(group.rows) < 2:
        return ui.Charts([])
    advised = group.advised
    roles = {advice.cell.cell_id for advice in advised.advice} if advised else set()
    roles |= {group.rows[0].relative.baseline}
    unranked = [cell for cell in group.rows if cell.relative.place is None]
    unranked.sort(key=lambda cell: -group.rate(cell).value)
    first, later = group.fair[:MOST_SHOWN], group.fair[MOST_SHOWN:]
    more = [*(cell for cell in later if cell.cell_id in roles), *unranked[:MOST_UNRANKED]]
    cells = [*first[: MOST_SHOWN - len(more)], *more]
    charts = [ui.Chart(throughput_bars(group, "speed", cells=cells), "Throughput")]
    if memory := memory_bars(group, "memory-of-these", cells):
        charts.append(ui.Chart(memory, "Peak memory"))
    if scatter := memory_scatter(group, "front"):
        charts.append(_front_chart(scatter, "Throughput against memory"))
    return ui.Charts(charts, prose("headline"))


def _ranked_table(group: Group) -> ui.Table:
    names = names_apart(group.rows)

    def interval(cell: CellResult) -> ui.Td:
        rate = group.rate(cell)
        ends = f"{number(rate.low)} to {number(rate.high)}"
        return ui.Td("1 trial: no interval" if rate.low is None else ends)

    columns: list[ReportColumn[CellResult]] = [
        ReportColumn("strategy", lambda cell: text_cell(names[cell.cell_id])),
        ReportColumn("may be fastest", lambda cell: text_cell(dot(cell))),
        figure("throughput", group.throughput, unit=group.unit),
        ReportColumn("95% interval", interval),
        step_time_column(),
        size_column("peak memory", "peak_memory_bytes"),
        word("parity", "parity_and_steps"),
    ]
    rows = [
        ui.Row(plain(cell.relative.place), [column.make(cell) for column in columns])
        for cell in group.rows
    ]
    return table_of("", group.full_title, "place", columns, rows)


def memory_charts(report: RunReport) -> Iterator[ui.Chart]:
    for index, group, title in comparable(report):
        if bars := memory_bars(group, f"memory-{index}"):
            yield ui.Chart(bars, title)


def memory_line(report: RunReport) -> str:
    return report.from_to(lambda cell: cell.memory.peak_memory_bytes, size)


def front_charts(report: RunReport) -> Iterator[ui.Chart]:
    for index, group, title in comparable(report):
        if scatter := memory_scatter(group, f"front-{index}"):
            yield _front_chart(scatter, title)


def _front_chart(scatter: Scatter, title: str) -> ui.Chart:
    names = tuple(
        f"{point.label}: {number(point.throughput)} {scatter.unit},"
        f" {number(point.memory)} {scatter.memory_unit}"
        for point in scatter.front
    )
    return ui.Chart(scatter, title, names)


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


def efficiency_bars(report: RunReport) -> Bars | None:
    """Charts how much of linear scaling each cell of the verdict's setting reaches."""
    group, base = report.leading, "efficiency_single"
    if group is None or group.devices < 2:
        return None
    cells = [cell for cell in group.fair if cell.column(base) is not None]

    def bar(cell: CellResult) -> Bar:
        value, low, high = (cell.column(f"{base}{end}") for end in ("", "_low", "_high"))
        text = percent(value) if low is None else f"{percent(value)} ({low:.0%} to {high:.0%})"
        return Bar(
            named(cell),
            100 * value,
            text,
            None if low is None else 100 * low,
            None if high is None else 100 * high,
            cell.relative.may_be_fastest,
            target=100.0,
        )

    if not cells:
        return None
    return bars_of(
        "efficiency-bars",
        f"Scaling efficiency · {group.full_title}",
        "throughput per device, % of the plain process on one device",
        cells,
        bar,
        f"Scaling efficiency of {plural(len(cells), 'cell')}, {group.full_title}, fastest first",
        ("upright line: linear scaling",),
        MOST_SHOWN,
    )


def scaling_charts(report: RunReport) -> list[Bars | Scaling | None]:
    return [
        efficiency_bars(report),
        *(
            curves
            for regime in ("strong", "weak")
            for curves in scaling(report.cells, regime)[:MOST_SCALING]
        ),
    ]


def scaled_cells(report: RunReport) -> list[CellResult]:
    def order(cell: CellResult) -> tuple[str, int, float]:
        share = cell.relative.efficiency_own
        return cell.cell.workload_name, cell.cell.devices, -(-1.0 if share is None else share)

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


_ON_ONE = "on one device, 95% interval"
EFFICIENCY: Numbers[RunReport] = Numbers(
    "efficiency",
    "Scaling efficiency",
    scaled_cells,
    lambda _: [
        word("Scaling", "regime"),
        ReportColumn("Against itself", with_interval("efficiency_own"), _ON_ONE),
        ReportColumn("Against the plain process", with_interval("efficiency_single"), _ON_ONE),
    ],
    note="efficiency",
)
SCALING_PANELS: tuple[Panel[RunReport], ...] = (Panel(scaling_charts, "scaling", more=_efficiency),)
