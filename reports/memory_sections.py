"""Memory: states against their formula, ranks' peaks, and the search for the largest model."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence

from harness.analysis.cell_result import CellResult
from harness.cell.errors import plural
from harness.record.plan import COLUMNS
from reports import blocks as ui
from reports.bar_chart import MOST_ROWS, Bar, Bars, bars_of, first_few
from reports.blocks import data, joined, prose, small
from reports.columns import (
    AnyColumn,
    ReportColumn,
    computed,
    figure,
    size_column,
    table_of,
    text_cell,
    word,
)
from reports.groups import by_setting
from reports.names import cell_name, chart_name, main_workload, names_apart, notes_for, titles_apart
from reports.run_facts import Largest, LargestModel
from reports.run_report import RunReport
from reports.sections import Numbers, Panel
from reports.text import MIB, memory_unit, number, percent, plain, signed, size

KINDS = {kind: f"{name}_bytes" for kind, name in COLUMNS.items()}
RESERVED = "Reserved by the library"
"""Column of a library's copies and buffers, which may be larger than the peak: pages that it never
wrote take no memory."""
WITHIN = 0.05
"""Relative distance from the formula that is not marked."""
MOST_UNEVEN = 16
MOST_NAMED = 12
MILLION = 1e6
_SMALL = 1e-3
"""Fraction of the states below which buffers are not named."""


def by_state_bytes(cells: Sequence[CellResult]) -> list[CellResult]:
    return sorted(cells, key=lambda cell: cell.states.state_bytes or 0.0)


def with_states(cells: Sequence[CellResult]) -> list[CellResult]:
    return [cell for cell in cells if cell.status == "ok" and cell.states.state_bytes is not None]


def state_stacks(
    cells: Sequence[CellResult], name: str, title: str, label: Callable[[CellResult], str]
) -> Bars:
    cells = by_state_bytes(cells)
    in_bytes = [_stack(cell, label(cell), 1) for cell in cells[:MOST_ROWS]]
    ends = [max(bar.value or 0.0, bar.target or 0.0, bar.peak or 0.0) for bar in in_bytes]
    limit = max(end for end in ends if end <= 3 * statistics.median(ends)) * 1.04 or MIB
    factor, unit = memory_unit([limit])
    cut = ("▸ the bar, ▹ the peak goes on beyond the axis",) if max(ends) > limit else ()
    return bars_of(
        name,
        title,
        f"fullest rank ({unit})",
        cells,
        lambda cell: _stack(cell, label(cell), factor),
        f"States that {plural(len(cells), 'cell')} keep between steps, with their distance from the"
        f" formula, {title}, least first",
        (*cut, *notes_for(cells)),
        kinds=tuple(KINDS),
        limit=limit / factor,
    )


def _stack(cell: CellResult, label: str, factor: int) -> Bar:
    away = cell.states.formula_deviation
    text = size(cell.states.state_bytes or 0.0)
    parts = tuple((cell.column(field) or 0.0) / factor for field in KINDS.values())
    formula, peak = cell.states.formula_bytes, cell.memory.peak_memory_bytes
    return Bar(
        label,
        sum(parts),
        text if away is None else f"{text} {signed(away)}",
        # Oversubscription does not change states.
        marks="†" if cell.placement.stand_in is not None else "",
        target=None if formula is None else formula / factor,
        failed=away is not None and abs(away) > WITHIN,
        parts=parts,
        peak=None if peak is None else peak / factor,
    )


def state_charts(report: RunReport) -> list[Bars]:
    """Returns a chart per setting; none for a search, whose cells have models of their own."""
    if report.is_search:
        return []
    groups = [group for group in by_setting(with_states(report.cells)) if len(group.rows) > 1]
    titles = [group.short_title(groups[0].workload) for group in groups]
    titles = titles_apart(titles, [group.rows[0] for group in groups])
    names = {name: text for group in groups for name, text in names_apart(group.rows).items()}
    return [
        state_stacks(group.rows, f"states-{i}", title, lambda cell: names[cell.cell_id])
        for i, (group, title) in enumerate(zip(groups, titles, strict=True))
    ]


def rehearsed_cells(report: RunReport) -> list[CellResult]:
    """Returns the cells whose states were measured and rehearsed, by precision and strategy, on the
    fewest ranks first."""
    cells = [cell for cell in with_states(report.cells) if cell.cell_id in report.rehearsed]
    return sorted(cells, key=lambda c: (c.cell.precision, c.cell.label, c.cell.devices))


def rehearsed_bars(report: RunReport) -> list[Bars]:
    """Charts states over the number of ranks: measured, rehearsed and by formula."""
    cells = rehearsed_cells(report)
    if not cells:
        return []
    factor, unit = memory_unit([cell.states.state_bytes or 0.0 for cell in cells])

    def bar(cell: CellResult) -> Bar:
        made = _stack(cell, chart_name(cell, main_workload(cells)), factor)
        return dataclasses.replace(made, peak=report.rehearsed[cell.cell_id] / factor)

    return [
        bars_of(
            "states-over-ranks",
            "States over the number of ranks",
            f"fullest rank ({unit})",
            cells,
            bar,
            "States that a rank keeps between steps, measured, rehearsed and by formula",
            kinds=tuple(KINDS),
        )
    ]


def states_line(report: RunReport) -> str:
    away = [cell.states.formula_deviation for cell in with_states(report.cells)]
    distances = [abs(deviation) for deviation in away if deviation is not None]
    near = sum(distance <= WITHIN for distance in distances)
    cells = plural(len(distances), "cell")
    return f"what is kept between steps; {near} of {cells} within {percent(WITHIN)} of the formula"


STATES: Numbers[RunReport] = Numbers(
    "states-table",
    "States between steps against the formula",
    lambda report: [
        cell
        for group in by_setting(with_states(report.cells))
        for cell in by_state_bytes(group.rows)
    ],
    lambda _: [
        *(
            size_column(
                RESERVED if kind == "library" else kind.capitalize(),
                field,
                f"{kind} of the fullest rank between steps",
            )
            for kind, field in KINDS.items()
        ),
        size_column("Together, with reserved", "state_bytes"),
        size_column("Formula", "formula_bytes", "for the dtypes and copies that the library keeps"),
        figure("Off by", "formula_deviation", signed, tip="measured over formula"),
        size_column(
            "Step adds", "formula_transient_bytes", "by formula: gradients, gathered parameters"
        ),
        size_column("Peak", "peak_memory_bytes", "of the fullest device, everything included"),
        figure(
            "In host memory",
            "host_state_bytes",
            lambda value: size(value or None),
            tip="kept off the device",
        ),
    ],
)


def _buffers(cell: CellResult) -> tuple[tuple[str, str], ...]:
    """Returns names and sizes of a library's buffers, largest first, with all small buffers as
    one."""
    try:
        sizes = json.loads(cell.states.library_buffers or "{}")
    except ValueError:
        return ()
    if not isinstance(sizes, dict):
        return ()
    pairs = sorted(((str(n), float(b)) for n, b in sizes.items()), key=lambda pair: -pair[1])
    least = _SMALL * (cell.states.state_bytes or 0.0)
    names = [(name, size(value)) for name, value in pairs if value >= least]
    rest = [value for _, value in pairs[len(names) :]]
    if names and rest:
        names.append((plural(len(rest), "smaller one"), size(sum(rest))))
    return tuple(names)


def buffers_table(cells: Sequence[CellResult]) -> ui.Table:
    """Returns the buffers by name, with the cells that keep them."""
    alike: dict[tuple[tuple[str, str], ...], list[CellResult]] = {}
    for cell in with_states(cells):
        if names := _buffers(cell):
            alike.setdefault(names, []).append(cell)
    rows = []
    for names, same in sorted(alike.items(), key=lambda item: -_largest_buffer(item[1][0])):
        keepers = [
            [
                *cell_name(cell),
                " ",
                small(f"x{cell.cell.devices} "),
                data(cell.cell.workload_name, "small"),
            ]
            for cell in same[:MOST_NAMED]
        ]
        more = f" and {len(same) - MOST_NAMED} more" if len(same) > MOST_NAMED else ""
        head = joined([[data(name), f": {text}"] for name, text in names], "; ")
        rows.append(ui.Row(head, [ui.Td([*joined(keepers), more], "prose")]))
    first = "Reserved on the fullest rank"
    return ui.Table("", "Buffers of libraries", first, ui.heads("Cells: prose"), rows, "")


def _largest_buffer(cell: CellResult) -> float:
    return max(map(float, json.loads(cell.states.library_buffers or "{}").values()))


def _uneven(report: RunReport) -> list[CellResult]:
    several = [
        cell
        for cell in report.cells
        if cell.status == "ok" and len(cell.memory.peak_memory_bytes_by_rank) > 1
    ]
    return sorted(several, key=imbalance, reverse=True)


def imbalance(cell: CellResult) -> float:
    """Returns the largest peak over the ranks' mean."""
    peaks = cell.memory.peak_memory_bytes_by_rank
    return float(max(peaks) / statistics.fmean(peaks))


def rank_bars(report: RunReport) -> list[Bars]:
    """Returns ranks' peaks in percent of the cell's mean."""
    rows = _uneven(report)
    if not rows:
        return []
    main = main_workload(report.cells)

    def bar(cell: CellResult) -> Bar:
        peaks = cell.memory.peak_memory_bytes_by_rank
        text = f"{number(imbalance(cell))} · {size(max(peaks))}"
        dots = tuple(peak / statistics.fmean(peaks) * 100 for peak in peaks)
        return Bar(chart_name(cell, main), None, text, dots=dots)

    return [
        bars_of(
            "ranks",
            "Peak of each rank, the most uneven cells first",
            "peak of each rank (% of the mean of the cell’s ranks)",
            rows,
            bar,
            "Peak memory of each rank in percent of the mean of its cell, and in words the largest"
            " over the mean and the largest",
            ("right: largest over mean, largest",),
            MOST_UNEVEN,
        )
    ]


RANKS: Numbers[RunReport] = Numbers(
    "ranks-table",
    "Peak memory of each rank",
    _uneven,
    lambda _: [
        computed("Uneven", "imbalance", imbalance, unit="largest / mean"),
        ReportColumn(
            "Peaks",
            lambda cell: text_cell(", ".join(map(size, cell.memory.peak_memory_bytes_by_rank))),
            "in the order of ranks",
            "in the trial with the largest",
        ),
    ],
)
STATE_PANELS: tuple[Panel[RunReport], ...] = (
    Panel(rehearsed_bars, "legend rehearsed"),
    Panel(
        state_charts,
        "legend states",
        [STATES],
        note="states",
        more=lambda report: [
            ui.Details("What the libraries reserve, by name", [buffers_table(report.cells)])
        ],
    ),
    Panel(rank_bars, tables=[RANKS], title="Uneven memory across devices", note="ranks"),
)


def largest_blocks(report: RunReport) -> ui.Blocks:
    found = report.largest
    if found is None:
        return []
    searched = found.growth.unit if found.growth.step else "blocks"
    trials = plural(sum(model.result.probes for model in found.models), "trial")
    about = prose("largest", searched=searched, budget=found.budget, trials=trials)
    return [
        ui.Charts([ui.Chart(_largest_bars(found))], about),
        *(ui.Paragraph(data(sentence)) for sentence in found.order),
        _largest_table(found),
        ui.Details("What fills the budget when memory runs out", [ui.Facts(found.limits)]),
    ]


def _largest_bars(found: Largest) -> Bars:
    ordered = sorted(found.models, key=lambda model: -(model.result.parameters or 0))
    best = ordered[0].result.parameters
    scale, suffix = (1, "") if found.growth.step else (MILLION, "M")

    def bar(model: LargestModel) -> Bar:
        row = model.result
        value, target = (n / scale if n else None for n in (row.parameters, row.predicted))
        ratio = "" if row.ratio is None else f" ({number(row.ratio)})"
        return Bar(
            f"{row.label} x{model.devices}" if model.devices else row.label,
            value,
            f"{number(value)}{suffix}{ratio}" if value else row.status,
            strong=bool(value) and row.parameters == best,
            target=target,
            failed=not value and row.status != "unfinished",
        )

    bars = tuple(map(bar, ordered))
    unit = f"{'' if found.growth.step else 'millions of '}{found.growth.unit}"
    return Bars(
        "largest",
        "Largest size, measured and by the formula",
        f"{unit}; in brackets: over the formula's",
        bars,
        f"{found.growth.what.capitalize()} that trains in {unit}, in brackets over the formula's:"
        f" {first_few(bars, len(bars))}",
    )


def _largest_table(found: Largest) -> ui.Table:
    unit, (most, what) = found.growth.unit, found.growth.what.split()
    least = {"longest": "shortest", "widest": "narrowest"}.get(most, "smallest")
    allowed = "largest size by states, activations and temporary memory"
    columns: list[AnyColumn] = [
        figure("Ranks", "devices", lambda ranks: plain(ranks or None)),
        figure("Reached", "result.parameters", plain, unit, f"the {most} {what} that trains"),
        figure(
            "Too large", "result.next_parameters", plain, unit, f"the {least} {what} that does not"
        ),
        figure(
            "Search step", "result.step", plain, unit, "" if found.growth.step else "of one block"
        ),
        figure("Formula", "result.predicted", plain, unit, allowed),
        figure("Reached / formula", "result.ratio"),
        size_column("Peak", "result.peak_memory_bytes", "fullest rank"),
        size_column("Set-up peak", "result.setup_peak_memory_bytes", "before the first step"),
        size_column("States", "state_bytes", "fullest rank, between steps"),
        word("Runs out in", "result.failed_in"),
        word("Parity", "result.parity"),
        word("Search", "result.status"),
    ]
    rows = [
        ui.Row(
            ui.Span(model.label, "data", f"#cell-{model.cell_id}"),
            [column.make(model) for column in columns],
            {"data-cell": model.cell_id},
        )
        for model in found.models
    ]
    label = f"{most.title()} trainable {what}, {len(rows)} strategies"
    return table_of("largest-table", label, "Strategy", columns, rows)
