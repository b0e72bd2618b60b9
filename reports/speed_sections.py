from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.analysis.answer import answer
from harness.analysis.baseline import micro_batch, scaling_series
from harness.analysis.cell_result import CellResult
from harness.analysis.setting import SCALED, batch, setting
from harness.spec.text import plural
from reports import blocks as ui
from reports.bar_chart import MOST_ROWS, Bar, Bars, first_few, omitted
from reports.blocks import data, prose
from reports.columns import (
    ReportColumn,
    cell_table,
    device_columns,
    figure,
    mebibytes,
    milliseconds,
    table_of,
    with_interval,
    word,
    words,
)
from reports.groups import RankedCell, RankedGroup, pareto, possibly_fastest
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
from reports.text import DASH, MIB, exact, number, percent, plain

MOST_CHARTS = 12
MOST_SHOWN = 16
MOST_SCALING = 4


def throughput_bars(
    group: RankedGroup,
    name: str,
    labels: Mapping[str, str] | None = None,
    cells: Sequence[RankedCell] = (),
) -> Bars:
    """Charts throughput with 95 % intervals; bars of advised or tied cells are strong.

    `labels`: by cell id. `cells`: by default all, fastest first.
    """
    best, bars, (baseline, level) = possibly_fastest(group), [], _baseline(group)
    shown = cells or group.rows[:MOST_ROWS]
    for cell in shown:
        rate = group.rate(cell)
        spread = "" if rate.half_width is None else f" ± {number(rate.half_width, 2)}"
        text = number(rate.value) + spread
        strong = cell.cell_id in best
        label = named(cell, place=False, label=(labels or {}).get(cell.cell_id, ""))
        label += "" if cell.parity.same_training else INEXACT
        bar = Bar(label, rate.value, text, rate.low, rate.high, strong, marks(cell), level)
        bars.append(bar)
    another = any(not cell.parity.same_training for cell in shown)
    return Bars(
        name,
        group.title,
        f"throughput ({group.unit}), 95 % interval",
        tuple(bars),
        f"Throughput of {plural(len(group.rows), 'cell')}, {group.title}, fastest first: "
        + first_few(bars, 5, f" {group.unit}"),
        ((f"upright line: {baseline.cell.label}, the baseline",) if baseline else ())
        + ((NOT_THE_SAME,) if another else ())
        + notes_for(shown)
        + omitted(len(group.rows), len(shown)),
    )


def _baseline(group: RankedGroup) -> tuple[RankedCell | None, float | None]:
    known = [cell for cell in group.rows if cell.relative.baseline == cell.cell_id]
    return (known[0], group.rate(known[0]).value) if known else (None, None)


def memory_bars(group: RankedGroup, name: str, cells: Sequence[RankedCell] = ()) -> Bars | None:
    """Charts peak memory in MiB with its range. `cells`: by default all."""
    known = [cell for cell in group.rows if cell.memory.peak_memory_bytes is not None]
    if not known:
        return None
    known.sort(key=_peak)
    least = _peak(known[0])
    shown = cells or known[:MOST_ROWS]
    bars = [_memory_bar(cell, least) for cell in shown]
    return Bars(
        name,
        group.title,
        "peak memory of the fullest device (MiB), range over trials",
        tuple(bars),
        f"Peak memory of {plural(len(bars), 'cell')}, {group.title}: " + first_few(bars, 5, " MiB"),
        notes_for(shown) + omitted(len(known), len(shown)),
    )


def _memory_bar(cell: RankedCell, least: float) -> Bar:
    label, peak = named(cell, place=False), cell.memory.peak_memory_bytes
    if peak is None:
        return Bar(label, None, DASH)
    low = (cell.memory.peak_memory_bytes_low or 0) / MIB
    shown_low = low if cell.trials > 1 else None
    value, strong = peak / MIB, low <= least
    return Bar(label, value, number(value), shown_low, value, strong, marks(cell))


def _peak(cell: RankedCell) -> float:
    return (cell.memory.peak_memory_bytes or 0) / MIB


def memory_scatter(group: RankedGroup, name: str) -> Scatter | None:
    """Charts throughput over memory; None if fewer than three cells have measured memory."""
    front = {cell.cell_id: place for place, cell in enumerate(pareto(group), 1)}
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
    words = "; ".join(
        f"{p.label} {number(p.throughput)} {group.unit} in {number(p.memory)} MiB"
        for p in points
        if p.place
    )
    summary = (
        f"Peak memory against throughput, {group.title}. No other cell is better in both than:"
        f" {words}"
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
    advised = answer(group.rows)
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
        ReportColumn("95 % interval", interval),
        milliseconds("step p50", "step_seconds_p50"),
        mebibytes("peak memory", "peak_memory_bytes"),
        word("parity", "parity_verdict"),
    ]

    def place(cell: RankedCell) -> str:
        return f"{cell.place}{f' ≈ {cell.place - 1}' if cell.same_as_above else ''}"

    rows = [ui.Row(place(cell), [column.make(cell) for column in columns]) for cell in group.rows]
    return table_of("", group.full_title, "place", columns, rows)


def memory_blocks(report: RunReport) -> ui.Blocks:
    charts = [
        ui.Chart(bars, title)
        for index, group, title in comparable(report)
        if (bars := memory_bars(group, f"memory-{index}"))
    ]
    return [ui.Charts(charts, prose("memory"))]


def front_blocks(report: RunReport) -> ui.Blocks:
    charts = []
    for index, group, title in comparable(report):
        if scatter := memory_scatter(group, f"front-{index}"):
            names = tuple(
                f"{point.label}: {number(point.throughput)} {scatter.unit},"
                f" {number(point.memory)} MiB"
                for point in scatter.front
            )
            charts.append(ui.Chart(scatter, title, names))
    return [ui.Charts(charts, prose("front"))]


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
    """Joins cells with equally many micro-batches, and remaining ones with equally large ones."""
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
    words = "; ".join(f"{line.summary} {unit(column)}" for line in lines[:6])
    return Scaling(
        name,
        title,
        unit(column),
        tuple(lines),
        tuple((n, base * n / start) for n in counts),
        f"{title}, {plural(len(lines), 'line')} over {counts[0]} to {counts[-1]} devices: {words}",
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
    words = [f"{regime.capitalize()} scaling", cell.cell.workload_name, cell.cell.precision, held]
    if cell.cell.optimizer != "adamw":
        words.append(cell.cell.optimizer)
    return " · ".join(words)


def scaling_blocks(cells: Sequence[CellResult]) -> ui.Blocks:
    charts = [
        ui.Chart(curves)
        for regime in ("strong", "weak")
        for curves in scaling(cells, regime)[:MOST_SCALING]
    ]
    table = efficiency(cells)
    shares = [cell.relative.efficiency_single for cell in scaled_cells(cells)]
    known = [share for share in shares if share is not None]
    best = f", at best {percent(max(known))} of linear" if known else ""
    numbers = ui.Details(
        f"Scaling efficiency of {plural(len(table.rows), 'cell')}{best}",
        [ui.Part("", [table], prose("efficiency"))],
    )
    return [ui.Charts(charts, prose("scaling")), numbers]


def scaled_cells(cells: Sequence[CellResult]) -> list[CellResult]:
    return [
        cell
        for cell in cells
        if cell.cell.devices > 1
        and (
            cell.relative.efficiency_own is not None or cell.relative.efficiency_single is not None
        )
    ]


def efficiency(cells: Sequence[CellResult]) -> ui.Table:

    def order(cell: CellResult) -> tuple[str, int, float]:
        own = cell.relative.efficiency_own
        return cell.cell.workload_name, cell.cell.devices, -(-1.0 if own is None else own)

    shown = sorted(scaled_cells(cells), key=order)
    on_one = "on one device, 95 % interval"
    columns: list[ReportColumn[CellResult]] = [
        word("Workload", "workload"),
        *device_columns(shown),
        word("Scaling", "regime"),
        word("Precision", "precision"),
        batch_column(),
        ReportColumn("Against itself", with_interval("efficiency_own"), on_one),
        ReportColumn("Against the plain process", with_interval("efficiency_single"), on_one),
    ]
    return cell_table("efficiency", "Scaling efficiency", shown, columns)


def batch_column() -> ReportColumn[CellResult]:
    def make(cell: CellResult) -> ui.Td:
        value = cell.cell.global_batch
        size = ui.Span(plain(value), field="global_batch", value=exact(value))
        return ui.Td([size, " weak"] if cell.cell.regime == "weak" else size)

    return ReportColumn("Batch", make, "samples", "global batch")
