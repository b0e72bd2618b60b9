from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.analysis.cell_result import CellResult
from harness.analysis.maxsize import MaxsizeResult, limits, maxsize_results, order_notes
from harness.record.plan import COLUMNS, MATRIX, Plan
from harness.record.run_record import RunRecord
from harness.record.trial import TrialRecord
from harness.spec.cell import Cell
from harness.spec.text import plural
from reports import blocks as ui
from reports.bar_chart import MOST_ROWS, Bar, Bars, first_few, omitted
from reports.blocks import data, joined, prose, small
from reports.columns import (
    ReportColumn,
    cell_table,
    computed,
    device_columns,
    figure,
    mebibytes,
    table_of,
    word,
    words,
)
from reports.groups import by_setting
from reports.names import cell_name, chart_name, main_workload, named, notes_for
from reports.text import MIB, number, plain, scaled, signed, size

if TYPE_CHECKING:
    from harness.record.store import Results

KINDS = {kind: f"{name}_bytes" for kind, name in COLUMNS.items()}
WITHIN = 0.05
"""Relative distance from the formula that is not marked."""
MOST_CHARTS = 12
MOST_UNEVEN = 16
MOST_NAMED = 12
MILLION = 1e6
_SMALL = 1e-3
"""Fraction of the states below which buffers are not named."""
_NUMBERS = "All cells in numbers"


def by_state_bytes(cells: Sequence[CellResult]) -> list[CellResult]:
    return sorted(cells, key=lambda cell: cell.states.state_bytes or 0.0)


def state_stacks(
    cells: Sequence[CellResult], name: str, title: str, label: Callable[[CellResult], str]
) -> Bars:
    cells = by_state_bytes(cells)
    bars = [_stack(cell, label(cell)) for cell in cells[:MOST_ROWS]]
    ends = [max(bar.value or 0.0, bar.target or 0.0, bar.peak or 0.0) for bar in bars]
    usual = [end for end in ends if end <= 3 * statistics.median(ends)]
    limit = max(usual, default=1.0) * 1.04 or 1.0
    cut = "▸ the bar, ▹ the peak goes on beyond the axis"
    return Bars(
        name,
        title,
        "fullest rank (MiB)",
        tuple(bars),
        f"States that {plural(len(cells), 'cell')} keep between steps, with their distance from the"
        f" formula, {title}, least first: {first_few(bars, 5)}",
        ((cut,) if any(end > limit for end in ends) else ())
        + notes_for(cells)
        + omitted(len(cells)),
        kinds=tuple(KINDS),
        limit=limit,
    )


def _stack(cell: CellResult, label: str) -> Bar:
    away = cell.states.formula_deviation
    text = f"{number((cell.states.state_bytes or 0.0) / MIB)} MiB"
    parts = tuple((cell.column(field) or 0.0) / MIB for field in KINDS.values())
    return Bar(
        label,
        sum(parts),
        text if away is None else f"{text} {signed(away)}",
        # Oversubscription does not change states.
        marks="†" if cell.placement.stand_in is not None else "",
        target=None if cell.states.formula_bytes is None else cell.states.formula_bytes / MIB,
        failed=away is not None and abs(away) > WITHIN,
        parts=parts,
        peak=None if cell.memory.peak_memory_bytes is None else cell.memory.peak_memory_bytes / MIB,
    )


def with_states(cells: Sequence[CellResult]) -> list[CellResult]:
    return [cell for cell in cells if cell.status == "ok" and cell.states.state_bytes is not None]


def state_charts(cells: Sequence[CellResult]) -> list[Bars]:
    groups = [group for group in by_setting(with_states(cells)) if len(group.rows) > 1]
    return [
        state_stacks(group.rows, f"states-{i}", group.short_title(groups[0].workload), named)
        for i, group in enumerate(groups)
    ]


def states_blocks(cells: Sequence[CellResult], one_model: bool = True) -> ui.Blocks:
    """Returns states and ranks' peaks. `one_model`: false omits charts, as in a search."""
    charts = [ui.Chart(bars) for bars in state_charts(cells)[:MOST_CHARTS]] if one_model else []
    states: ui.Blocks = [
        ui.Charts(charts, prose("legend states")),
        ui.Details(_NUMBERS, [_states_table(cells)]),
        ui.Details("The library’s buffers by name", [_buffers_table(buffers(cells))]),
    ]
    return [ui.Part("", states, prose("states")), _ranks_part(cells)]


def _states_table(cells: Sequence[CellResult]) -> ui.Table:
    rows = [cell for group in by_setting(with_states(cells)) for cell in by_state_bytes(group.rows)]
    columns = [
        word("Workload", "workload"),
        *device_columns(rows),
        *(
            mebibytes(kind.capitalize(), field, f"{kind} of the fullest rank between steps")
            for kind, field in KINDS.items()
        ),
        mebibytes("Together", "state_bytes"),
        mebibytes("Formula", "formula_bytes", "for the dtypes and copies that the library keeps"),
        figure("Off by", "formula_deviation", signed, tip="measured over formula"),
        mebibytes(
            "Step adds", "formula_transient_bytes", "by formula: gradients, gathered parameters"
        ),
        mebibytes("Peak", "peak_memory_bytes", "of the fullest device, everything included"),
        figure(
            "In host memory",
            "host_state_bytes",
            lambda value: scaled(value or None, 1 / MIB),
            "MiB",
            "kept off the device",
        ),
    ]
    return cell_table("states-table", "States between steps against the formula", rows, columns)


@dataclass(frozen=True)
class Buffers:
    """Buffers of equal names, and the cells that keep them."""

    names: tuple[tuple[str, str], ...]
    rows: tuple[CellResult, ...]


def buffers(cells: Sequence[CellResult]) -> list[Buffers]:
    grouped: dict[tuple[tuple[str, str], ...], tuple[float, list[CellResult]]] = {}
    for cell in with_states(cells):
        sizes = _buffer_sizes(cell.states.library_buffers)
        least = _SMALL * (cell.states.state_bytes or 0.0)
        large = [(name, value) for name, value in sizes if value >= least]
        small = [value for _, value in sizes[len(large) :]]
        if large:
            names = [(name, size(value)) for name, value in large]
            if small:
                names.append((plural(len(small), "smaller one"), size(sum(small))))
            grouped.setdefault(tuple(names), (large[0][1], []))[1].append(cell)
    largest_first = sorted(grouped.items(), key=lambda item: -item[1][0])
    return [Buffers(names, tuple(rows)) for names, (_, rows) in largest_first]


def _buffer_sizes(text: str | None) -> list[tuple[str, float]]:
    try:
        sizes = json.loads(text or "{}")
    except ValueError:
        return []
    if not isinstance(sizes, dict):
        return []
    named_sizes = [(str(name), float(value)) for name, value in sizes.items()]
    return sorted(named_sizes, key=lambda pair: -pair[1])


def _buffers_table(lists: Sequence[Buffers]) -> ui.Table:
    columns = ui.heads("Cells: prose")
    rows = []
    for same in lists:
        names = joined([[data(name), f": {size_}"] for name, size_ in same.names], "; ")
        cells = [
            [
                *cell_name(cell),
                " ",
                small(f"x{cell.cell.devices} "),
                data(cell.cell.workload_name, "small"),
            ]
            for cell in same.rows[:MOST_NAMED]
        ]
        more = len(same.rows) - len(cells)
        rows.append(
            ui.Row(
                names, [ui.Td([*joined(cells), f" and {more} more" if more > 0 else ""], "prose")]
            )
        )
    return ui.Table("", "Buffers of libraries", "Buffers of the fullest rank", columns, rows, "")


def _uneven(cells: Sequence[CellResult]) -> list[CellResult]:
    several = [
        cell
        for cell in cells
        if cell.status == "ok" and len(cell.memory.peak_memory_bytes_by_rank) > 1
    ]
    return sorted(several, key=imbalance, reverse=True)


def imbalance(cell: CellResult) -> float:
    """Returns the largest peak over the ranks' mean."""
    peaks = cell.memory.peak_memory_bytes_by_rank
    return float(max(peaks) / statistics.fmean(peaks))


def rank_bars(cells: Sequence[CellResult]) -> Bars | None:
    """Returns ranks' peaks in % of the cell's mean."""
    rows = _uneven(cells)
    if not rows:
        return None
    main = main_workload(cells)
    bars = []
    for cell in rows[:MOST_UNEVEN]:
        peaks = cell.memory.peak_memory_bytes_by_rank
        mean = statistics.fmean(peaks)
        text = f"{number(imbalance(cell))} · {number(max(peaks) / MIB)} MiB"
        dots = tuple(peak / mean * 100 for peak in peaks)
        bars.append(Bar(chart_name(cell, main), None, text, dots=dots))
    return Bars(
        "ranks",
        "Peak of each rank, the most uneven cells first",
        "peak of each rank (% of the mean of the cell’s ranks)",
        tuple(bars),
        "Peak memory of each rank in % of the mean of its cell, and in words the largest over the"
        f" mean and the largest: {first_few(bars, 5)}",
        ("right: largest over mean, largest", *omitted(len(rows), MOST_UNEVEN)),
    )


def _ranks_part(cells: Sequence[CellResult]) -> ui.Part:
    bars, rows = rank_bars(cells), _uneven(cells)
    columns = [
        word("Workload", "workload"),
        *device_columns(rows),
        computed("Uneven", "imbalance", imbalance, unit="largest / mean"),
        ReportColumn(
            "Peaks", _peaks, "MiB, in the order of ranks", "in the trial with the largest"
        ),
    ]
    table = cell_table("ranks-table", "Peak memory of each rank", rows, columns)
    charts = ui.Charts([ui.Chart(bars)] if bars else [])
    blocks: ui.Blocks = [charts, ui.Details(_NUMBERS, [table])]
    return ui.Part("Uneven memory across devices", blocks, prose("ranks"))


def _peaks(cell: CellResult) -> ui.Td:
    return words(", ".join(number(peak / MIB) for peak in cell.memory.peak_memory_bytes_by_rank))


@dataclass(frozen=True)
class LargestModel:
    """A strategy's largest size (parameters or tokens) and the cell that reached it."""

    result: MaxsizeResult
    cell_id: str
    devices: int

    @property
    def label(self) -> str:
        return self.result.label

    @property
    def state_bytes(self) -> int | None:
        return sum(self.result.kept.values()) or None


@dataclass(frozen=True)
class Largest:
    budget: str
    winner: LargestModel | None
    bars: Bars
    table: ui.Table
    order: tuple[str, ...]
    limits: tuple[tuple[str, str], ...]
    """Strategy, and what filled its memory or why it has no size."""
    probes: int
    tokens: bool = False

    @property
    def unit(self) -> str:
        return "tokens" if self.tokens else "parameters"

    @property
    def what(self) -> str:
        return "longest sequence" if self.tokens else "largest model"


def largest_blocks(found: Largest | None) -> ui.Blocks:
    if found is None:
        return []
    searched = "tokens of a sequence" if found.tokens else "blocks"
    trials = plural(found.probes, "trial")
    about = prose("largest", searched=searched, budget=found.budget, trials=trials)
    return [
        ui.Charts([ui.Chart(found.bars)], about),
        *(ui.Paragraph(data(sentence)) for sentence in found.order),
        found.table,
        ui.Details("What fills the budget when memory runs out", [ui.Facts(found.limits)]),
    ]


def is_search(run: RunRecord) -> bool:
    return run.matrix == MATRIX


def verified(trial: TrialRecord) -> bool:
    return trial.trial == 1 or trial.status not in ("ok", "out_of_memory")


def largest(results: Results) -> Largest | None:
    """Returns a search's result; None for other runs."""
    try:
        plan = Plan.from_row(results.runs.iloc[0].to_dict())
        rows = maxsize_results(results) if plan.search else []
    except (KeyError, TypeError, ValueError):
        return None
    if not rows or plan.search is None:
        return None
    cells = {cell.label: cell for cell in plan.cells}
    tokens = int(plan.search.get("tokens", 0))
    lines = [_line(row, cells.get(row.label)) for row in rows]
    reasons = [
        (row.label, f"{row.status}: {row.reason}" if row.reason else limits(row)) for row in rows
    ]
    chains = [
        sentence for chain in plan.search["order"] if (sentence := order_sentence(rows, chain))
    ]
    reached = [line for line in lines if line.result.parameters]
    return Largest(
        size(plan.search["budget"]),
        max(reached, key=lambda line: line.result.parameters or 0, default=None),
        _largest_bars(lines, bool(tokens)),
        _largest_table(lines, bool(tokens)),
        (*chains, *order_notes(rows, plan.search["order"])),
        tuple((label, text) for label, text in reasons if text),
        sum(row.probes for row in rows),
        bool(tokens),
    )


def _line(row: MaxsizeResult, cell: Cell | None) -> LargestModel:
    if cell is None:
        return LargestModel(row, "", 0)
    size = {"sequence_length": row.parameters} if row.tokens and row.parameters else {}
    reached = cell.model_copy(update={"workload": row.workload, **size})
    return LargestModel(row, reached.id if row.parameters else "", cell.devices)


def order_sentence(rows: Sequence[MaxsizeResult], chain: Sequence[str]) -> str:
    """Returns `Measured order, as theory predicts: a 10.0M < b 20.0M`, if any."""
    by_label = {row.label: row for row in rows if row.parameters}
    present = [by_label[label] for label in chain if label in by_label]
    if len(present) < 2:
        return ""
    kept = all(
        (more.parameters or 0) > (less.parameters or 0)
        for less, more in itertools.pairwise(present)
    )
    measured = sorted(present, key=lambda row: row.parameters or 0)
    words = f"{measured[0].label} {measured[0].largest_model}"
    for less, more in itertools.pairwise(measured):
        sign = "<" if less.parameters != more.parameters else "="
        words += f" {sign} {more.label} {more.largest_model}"
    if kept:
        return f"Measured order, as theory predicts: {words}"
    return f"Measured order: {words}; theory predicts {' < '.join(row.label for row in present)}"


def _largest_bars(lines: Sequence[LargestModel], tokens: bool) -> Bars:
    ordered = sorted(lines, key=lambda line: -(line.result.parameters or 0))
    best = ordered[0].result.parameters
    bars = [_largest_bar(line, best, tokens) for line in ordered]
    words = first_few(bars, len(bars))
    what = "Longest sequence in" if tokens else "Largest trainable model in millions of"
    unit = "tokens" if tokens else "parameters"
    return Bars(
        "largest",
        "Largest size, measured and by the formula",
        f"{'' if tokens else 'millions of '}{unit}; in brackets: over the formula's",
        tuple(bars),
        f"{what} {unit}, in brackets over the formula's: {words}",
    )


def _largest_bar(line: LargestModel, best: int | None, tokens: bool) -> Bar:
    scale, suffix = (1, "") if tokens else (MILLION, "M")
    row = line.result
    value, target = (n / scale if n else None for n in (row.parameters, row.predicted))
    ratio = "" if row.ratio is None else f" ({number(row.ratio)})"
    return Bar(
        f"{line.label} x{line.devices}" if line.devices else line.label,
        value,
        f"{number(value)}{suffix}{ratio}" if value else row.status,
        strong=bool(value) and row.parameters == best,
        target=target,
        failed=not value and row.status != "unfinished",
    )


def _largest_table(lines: Sequence[LargestModel], tokens: bool) -> ui.Table:
    unit, what = ("tokens", "sequence") if tokens else ("parameters", "model")
    most, least = ("longest", "shortest") if tokens else ("largest", "smallest")
    allowed = "largest size by states, activations and temporary memory"
    columns: list[ReportColumn[LargestModel]] = [
        figure("Ranks", "devices", lambda ranks: plain(ranks or None)),
        figure("Reached", "result.parameters", plain, unit, f"the {most} {what} that trains"),
        figure(
            "Too large", "result.next_parameters", plain, unit, f"the {least} {what} that does not"
        ),
        figure("Search step", "result.step", plain, unit, "" if tokens else "of one block"),
        figure("Formula", "result.predicted", plain, unit, allowed),
        figure("Reached / formula", "result.ratio"),
        mebibytes("Peak", "result.peak_memory_bytes", "fullest rank"),
        mebibytes("Set-up peak", "result.setup_peak_memory_bytes", "before the first step"),
        mebibytes("States", "state_bytes", "fullest rank, between steps"),
        word("Runs out in", "result.failed_in"),
        word("Parity", "result.parity"),
        word("Search", "result.status"),
    ]
    rows = [
        ui.Row(
            ui.Span(line.label, "data", f"#cell-{line.cell_id}"),
            [column.make(line) for column in columns],
            {"data-cell": line.cell_id},
        )
        for line in lines
    ]
    label = f"{most.title()} trainable {what}, {len(lines)} strategies"
    return table_of("largest-table", label, "Strategy", columns, rows)
