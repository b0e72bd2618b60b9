"""Comparisons: one run or folder with another, or the newest run with several and its history."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.analysis.compare import RUNS_METHOD, ComparedCell, RunComparison, compare_sides
from harness.analysis.history import MIN_RUNS, Series, histories, method
from harness.analysis.selection import MeasuredCell, RunSelection, measured, select
from harness.analysis.setting import grouped
from harness.cell.errors import UsageError, plural
from harness.record.run_record import RunRecord
from reports import blocks as ui
from reports import run_facts
from reports.blocks import BREAK, data, joined, phrase, prose, small, strong
from reports.html_writer import PageHead
from reports.line_chart import Trend
from reports.markdown_writer import markdown_text
from reports.run_report import only
from reports.sections import Section, Written, written_page, written_text
from reports.text import DASH, MIB, exact, number, signed, size

if TYPE_CHECKING:
    from harness.record.store import Results

FOLDED = ("added", "no difference seen", "not compared")
"""Kinds of lines that a comment folds."""
_SIDES = "A is the other run, B the newest."
MOST_CHARTS = 60
MOST_CHANGES = 5
MOST_COLUMNS = 6
"""Maximum number of runs next to the newest. Older runs are in the history."""


@dataclass(frozen=True)
class Run:
    row: RunRecord
    hardware: str
    verified: int
    cells: int
    against: RunComparison | None
    why_not: str = ""
    """Reason why the comparison is missing or incomplete."""

    @property
    def run_id(self) -> str:
        return self.row.run_id


ComparedRow = tuple[MeasuredCell, list["ComparedCell | None"]]
"""A cell of the newest run, compared with each run that has a column."""


@dataclass(frozen=True)
class Runs:
    runs: tuple[Run, ...] = ()
    columns: tuple[Run, ...] = ()
    """Runs with a column, newest first, without the newest run itself."""
    throughput: tuple[Series, ...] = ()
    memory: tuple[Series, ...] = ()
    alone: RunComparison | None = None
    """Comparison of two sides that need not be runs, in place of the runs."""

    @property
    def comparisons(self) -> list[tuple[str, RunComparison]]:
        """Comparisons with the name of their first side, newest first."""
        if self.alone:
            return [(self.alone.first, self.alone)]
        return [(run.run_id, run.against) for run in self.columns if run.against]

    @property
    def newest(self) -> Run:
        return self.runs[-1]

    @property
    def series(self) -> list[Series]:
        return sorted((*self.throughput, *self.memory), key=lambda series: series.cell_name)

    @property
    def changed(self) -> list[Series]:
        """Series with level changes, latest change first."""
        changes = [(s.last_change.started_at, s) for s in self.series if s.last_change]
        return [s for _, s in sorted(changes, key=lambda pair: pair[0], reverse=True)]

    @property
    def older(self) -> tuple[Run, ...]:
        """Runs without a column, newest first."""
        return tuple(reversed(self.runs[: -1 - len(self.columns)]))

    @property
    def enough(self) -> bool:
        return max((len(series.points) for series in self.throughput), default=0) >= self.least

    @property
    def least(self) -> int:
        """Minimum number of runs of a cell that can show a change."""
        return 2 * MIN_RUNS

    @functools.cached_property
    def rows(self) -> list[ComparedRow]:
        rows: dict[str, ComparedRow] = {}
        for index, run in enumerate(self.columns):
            for line in run.against.lines if run.against else ():
                if line.throughput and line.second:
                    empty: ComparedRow = (line.second, [None] * len(self.columns))
                    rows.setdefault(line.second.cell_id, empty)[1][index] = line
        return sorted(rows.values(), key=lambda row: row[0].cell_name)

    @property
    def others(self) -> list[tuple[str, ComparedCell]]:
        """Cells without a throughput comparison, regressions first."""
        lines = [
            (name, line)
            for name, against in self.comparisons
            for line in against.lines
            if not line.throughput
        ]
        return sorted(lines, key=lambda pair: not self.alone and not pair[1].regression)

    @property
    def method(self) -> dict[str, str]:
        compared = next((against.method for _, against in self.comparisons), {})
        if self.alone:
            return compared
        history = {f"History: {name.lower()}": text for name, text in method("throughput").items()}
        return {"Test": RUNS_METHOD} | compared | history


def compare_all(results: Results) -> Runs:
    """Raises UsageError if fewer than two runs measured cells."""
    every = measured(results)
    cells = grouped(every, lambda cell: cell.run_id)
    records = [run for run in RunRecord.from_frame(results.runs) if run.run_id in cells]
    if len(records) < 2:
        there = ", ".join(run.run_id for run in records) or "none"
        raise UsageError(
            f"a comparison needs two runs with recorded trials of a matrix; there is {there} (a"
            " search for the largest model does not count)"
        )
    newest = records[-1]
    side = select(newest.run_id, only(results, [newest.run_id]))
    first_shown = max(0, len(records) - 1 - MOST_COLUMNS)
    runs = []
    for index, record in enumerate(records):
        against, why_not = None, ""
        if first_shown <= index < len(records) - 1:
            against, why_not = _against(results, record, newest, side)
        runs.append(_run(record, cells, against, why_not))
    return Runs(
        tuple(runs),
        tuple(reversed(runs[first_shown:-1])),
        tuple(histories(every, "throughput")),
        tuple(histories(every, "memory")),
    )


def _run(
    record: RunRecord,
    cells: Mapping[str, Sequence[MeasuredCell]],
    against: RunComparison | None,
    why_not: str,
) -> Run:
    run_cells = cells[record.run_id]
    verified = sum(cell.ok for cell in run_cells)
    return Run(record, run_facts.hardware(record), verified, len(run_cells), against, why_not)


def _against(
    results: Results, record: RunRecord, newest: RunRecord, side: RunSelection
) -> tuple[RunComparison | None, str]:
    """Returns the newest run's comparison with another, and why it is partial."""
    try:
        other = select(record.run_id, only(results, [record.run_id]))
        comparison = compare_sides(other, side)
    except UsageError as error:
        return None, str(error)
    if record.matrix == newest.matrix:
        return comparison, ""
    both = tuple(line for line in comparison.lines if line.first and line.second)
    rest = len(comparison.lines) - len(both)
    why_not = f"of another matrix: {plural(rest, 'cell')} in only one of the two"
    return dataclasses.replace(comparison, lines=both), why_not


def as_json(runs: Runs) -> dict[str, object]:
    compared = [run.against.as_json() for run in runs.columns if run.against]
    return {"comparisons": compared, "history": [series.as_json() for series in runs.series]}


def figure_unit(series: Series) -> tuple[str, float]:
    """Returns the displayed unit and the divisor of recorded values."""
    return ("samples/s", 1.0) if series.figure == "throughput" else ("MiB", float(MIB))


def change_words(series: Series, change: float) -> str:
    """Returns `▼ 10.0% slower`."""
    directions = ("more", "less") if series.figure == "memory" else ("faster", "slower")
    arrow = "▲" if change > 0 else "▼"
    return f"{arrow} {signed(abs(change)).lstrip('+')} {directions[change < 0]}"


def trend(series: Series, name: str) -> Trend:
    scaled, factor = figure_unit(series)
    values = tuple(point.value.value / factor for point in series.points)
    marked = [
        (i, change_words(series, point.change))
        for i, point in enumerate(series.points)
        if point.change is not None
    ]
    cuts = [0, *(i for i, _ in marked), len(values)]
    levels = tuple((a, b - 1, statistics.median(values[a:b])) for a, b in itertools.pairwise(cuts))
    changes = (
        "; ".join(
            f"{change} from {series.points[i].started_at:%Y-%m-%d} on" for i, change in marked
        )
        or "no change seen"
    )
    newest = f"newest {number(values[-1])} {scaled}"
    return Trend(
        name,
        series.cell_name,
        scaled,
        values,
        tuple(
            None if point.value.low is None else point.value.low / factor for point in series.points
        ),
        tuple(
            None if point.value.high is None else point.value.high / factor
            for point in series.points
        ),
        tuple(f"{point.started_at:%Y-%m-%d}" for point in series.points),
        tuple(marked),
        levels,
        f"{series.figure.capitalize()} of {series.cell_name} over {plural(len(values), 'run')}:"
        f" {newest}; {changes}",
    )


def verdict_blocks(runs: Runs) -> ui.Blocks:
    if runs.alone:
        return _headline(runs.alone)
    blocks: ui.Blocks = []
    if runs.columns and (against := runs.columns[0].against):
        text = prose("runs latest", run=data(runs.columns[0].run_id), headline=against.headline)
        blocks.append(ui.Paragraph(text, "lead"))
    if runs.changed:
        changes = [
            phrase(data(series.cell_name), f", {series.figure} {_last_change(series)}")
            for series in runs.changed[:MOST_CHANGES]
        ]
        count = f"{len(runs.changed)} of {len(runs.series)} series"
        text = prose("runs changed", count=count, changes=joined(changes, "; "))
        blocks.append(ui.Paragraph(text))
    elif runs.enough:
        blocks.append(ui.Paragraph(prose("runs unchanged")))
    columns = ui.heads(
        "The newest against it: prose", "Verified (of cells)", "Matrix and hardware: prose"
    )
    rows = [_run_row(run, runs.newest) for run in (runs.newest, *runs.columns)]
    label = "Runs, newest first"
    table = ui.Table("", label, "Run", columns, rows, "verdicts compact")
    blocks += [ui.Paragraph(prose("runs compared"), "small"), table]
    summary = f"{plural(len(runs.older), 'older run')}, in the history only"
    return [*blocks, ui.Details(summary, [ui.Facts(list(map(_older, runs.older)))])]


def _date(run: Run) -> str:
    return f"{run.row.started_at:%Y-%m-%d %H:%M} UTC"


def _run_row(run: Run, newest: Run) -> ui.Row:
    against: list[ui.Inline] = ["the newest" if run is newest else ""]
    if run.against:
        against = [run.against.headline]
        if differences := run.against.differences:
            names = joined([data(difference, "small") for difference in differences])
            against += [BREAK, small("not the same software: "), *names]
    if run.why_not:
        against += [BREAK, data(run.why_not, "small")] if run.against else [data(run.why_not)]
    torch = f"; PyTorch {run.row.torch_version}"
    where_run = [data(run.row.matrix), BREAK, data(run.hardware, "small"), data(torch, "small")]
    verified = f"{run.verified} / {run.cells}"
    return ui.Row(
        [data(run.run_id), BREAK, small(_date(run))],
        [ui.Td(against, "prose"), ui.Td(verified), ui.Td(where_run, "prose")],
    )


def _older(run: Run) -> tuple[str, list[ui.Inline]]:
    verified = f"{run.verified} of {plural(run.cells, 'cell')} verified"
    matrix, hardware = data(run.row.matrix), data(run.hardware)
    return run.run_id, phrase(f"{_date(run)}, matrix ", matrix, f", {verified}, ", hardware)


def _headline(compared: RunComparison) -> ui.Blocks:
    blocks: ui.Blocks = [ui.Paragraph(compared.headline, "lead")]
    if compared.differences:
        names = joined([data(difference) for difference in compared.differences])
        blocks.append(ui.Paragraph(prose("compare software", names=names), "caution"))
    if cells := disturbed(compared):
        text = prose("compare disturbed", cells=plural(len(cells), "cell"))
        blocks.append(ui.Paragraph(text, "caution"))
    return blocks


def cells_blocks(runs: Runs) -> ui.Blocks:
    if len(runs.comparisons) == 1:
        ((_, compared),) = runs.comparisons
        table = _table([line for line in compared.lines if line.throughput], compared.confidence)
        return [ui.Part("", [table], "" if runs.alone else _SIDES)]
    columns = ui.heads("Newest (samples/s)")
    columns += [ui.ColumnHead(run.run_id, "ratio, interval") for run in runs.columns]
    rows = [
        ui.Row(
            data(cell.cell_name),
            [ui.Td(_number("samples_per_second", cell.speed)), *map(_ratio, lines, runs.columns)],
            {"data-cell": cell.cell_id},
        )
        for cell, lines in runs.rows
    ]
    label = "Throughput of the newest run over the others"
    return [ui.Part("", [ui.Table("ratios", label, "Cell", columns, rows)], prose("runs cells"))]


def _table(lines: Sequence[ComparedCell], confidence: float) -> ui.Table:
    """Returns a row per cell: figures of both sides, and their ratio."""
    columns = ui.heads(
        "A samples/s",
        "B samples/s",
        "B / A (at equal machine speed)",
        f"{confidence * 100:.4g}% interval",
        "verdict: word",
        "peak memory, A to B",
    )
    label = "Throughput and memory of B over A"
    return ui.Table("", label, "cell", columns, list(map(_line_row, lines)))


def _line_row(line: ComparedCell) -> ui.Row:
    speed, memory, interval, peaks = line.throughput, line.memory, DASH, DASH
    if speed and speed.low is not None and speed.high is not None:
        interval = f"{speed.low:.3f} to {speed.high:.3f}"
    if line.first and line.second and memory:
        peaks = f"{size(line.first.peak)} to {size(line.second.peak)}, x {memory.ratio:.2f}"
    return ui.Row(
        data(line.cell_name),
        [
            *map(_side, (line.first, line.second)),
            ui.Td(_number("ratio", speed.ratio, f"{speed.ratio:.3f}") if speed else DASH),
            ui.Td(interval),
            verdict_td(line),
            ui.Td(_number("memory_ratio", memory.ratio, peaks) if memory else peaks),
        ],
        {"data-kind": line.kind},
    )


def _side(cell: MeasuredCell | None) -> ui.Td:
    trials = f" ({plural(cell.result.recorded_trials, 'trial')})" if cell else ""
    return ui.Td([number(cell.speed if cell else None), small(trials)])


def disturbed(compared: RunComparison) -> list[tuple[str, str]]:
    """Returns cells with disturbed trials, and what disturbed them."""
    return [
        (line.cell_name, "; ".join(line.disturbed)) for line in compared.lines if line.disturbed
    ]


def _number(field: str, value: float | None, text: str = "") -> ui.Span:
    return ui.Span(text or number(value), field=field, value=exact(value))


def _ratio(line: ComparedCell | None, run: Run) -> ui.Td:
    if line is None or line.throughput is None:
        return ui.Td(DASH)
    ratio = line.throughput
    content: list[ui.Inline] = [_number("ratio", ratio.ratio)]
    if ratio.low is not None and ratio.high is not None:
        content.append(small(f" ({number(ratio.low)} to {number(ratio.high)})"))
    kind = " bad" if line.regression else " good" if line.kind == "faster" else ""
    content += [BREAK, small(line.verdict)]
    return ui.Td(content, f"number{kind}", attributes={"data-run": run.run_id})


def others_blocks(runs: Runs) -> ui.Blocks:
    columns = [] if runs.alone else ui.heads("Newest against: word")
    columns += ui.heads("What: word", "Why: prose")
    rows = [
        ui.Row(
            data(line.cell_name),
            [
                *([] if runs.alone else [ui.Td(data(name), "word")]),
                verdict_td(line),
                ui.Td(data(line.reason), "prose"),
            ],
            {"data-kind": line.kind},
        )
        for name, line in runs.others
    ]
    label = "Cells without a comparison, with the reason"
    table = ui.Table("", label, "Cell", columns, rows)
    return [ui.Part("", [table], "" if runs.alone else _SIDES)]


def verdict_td(line: ComparedCell) -> ui.Td:
    good = line.kind in ("faster", "fixed")
    return ui.Td(
        data(line.verdict), f"word{' bad' if line.regression else ' good' if good else ''}"
    )


def history_blocks(runs: Runs) -> ui.Blocks:
    several = [
        series
        for series in (*runs.throughput, *runs.memory)
        if len(series.points) > 1 and (series.figure == "throughput" or series.last_change)
    ]
    several.sort(key=lambda series: series.last_change is None)
    charts = [
        ui.Chart(
            trend(series, f"trend-{index}"),
            f"{series.cell_name}{', peak memory' if series.figure == 'memory' else ''}",
        )
        for index, series in enumerate(several[:MOST_CHARTS])
    ]
    return [ui.Charts(charts, prose("runs history"))]


def changes_blocks(runs: Runs) -> ui.Blocks:
    columns = ui.heads("Figure: word", "Runs", "Newest", "Last change: word", "Left out: word")
    rows = [
        ui.Row(
            data(series.cell_name),
            [
                ui.Td(series.figure, "word"),
                ui.Td(str(len(series.points))),
                ui.Td(_newest(series)),
                ui.Td(_changed(series), "word"),
                ui.Td(_left_out(series), "word"),
            ],
            {"data-cell": series.cell_id, "data-figure": series.figure},
        )
        for series in runs.series
    ]
    few = "" if runs.enough else prose("runs few", least=runs.least)
    label = "Figures of all cells over the runs"
    return [ui.Part("", [ui.Table("series", label, "Cell", columns, rows)], few)]


def _newest(series: Series) -> list[ui.Inline]:
    unit, factor = figure_unit(series)
    newest = series.newest.value
    content: list[ui.Inline] = [
        _number("newest", newest.value, number(newest.value / factor)),
        f" {unit}",
    ]
    if newest.low is None or newest.high is None:
        return content
    ends = f" ({number(newest.low / factor)} to {number(newest.high / factor)})"
    return [*content, small(ends)]


def _changed(series: Series) -> list[ui.Inline]:
    last = series.last_change
    if last is None:
        return [DASH]
    return [_last_change(series), ", ", data(last.run_id, "small")]


def _last_change(series: Series) -> str:
    last = series.last_change
    if last is None or last.change is None:
        return DASH
    return f"{change_words(series, last.change)} since {last.started_at:%Y-%m-%d}"


def _left_out(series: Series) -> str:
    counts = ((series.elsewhere, "on other hardware"), (series.failed, "not verified"))
    return ", ".join(f"{plural(count, 'run')} {why}" for count, why in counts if count)


def method_blocks(runs: Runs) -> ui.Blocks:
    return [ui.Facts(list(runs.method.items()))]


SECTIONS: tuple[Section[Runs], ...] = (
    Section("verdict", "Verdict", verdict_blocks, in_text=True),
    Section("cells", "Throughput and memory", cells_blocks, "Cells", in_text=True),
    Section("others", "Without a comparison", others_blocks, in_text=True),
    Section(
        "disturbed",
        "Disturbed trials",
        lambda runs: [ui.Facts(disturbed(runs.alone))] if runs.alone else [],
    ),
    Section("history", "History", history_blocks),
    Section("changes", "All cells over the runs", changes_blocks, "Changes", in_text=True),
    Section("method", "How it was decided", method_blocks, in_text=True),
)


def runs_page(runs: Runs, requested: Sequence[str] = (), printed: bool = False) -> Written:
    if alone := runs.alone:
        head = PageHead(
            f"{alone.first} compared with {alone.second}",
            "What changed?",
            [
                ["A ", data(alone.first, "strong")],
                ["B ", data(alone.second, "strong")],
                plural(alone.comparisons, "comparison"),
            ],
            prose("compare footer"),
            navigation=False,
        )
        return written_page(runs, head, SECTIONS)
    newest, count = runs.newest, plural(len(runs.runs), "run")
    head = PageHead(
        f"{count} compared, the newest {newest.run_id}",
        "How do these runs compare?",
        [
            count,
            ["newest ", data(newest.run_id, "strong")],
            ["matrix ", data(newest.row.matrix, "strong")],
            data(newest.hardware),
        ],
        prose("runs footer"),
    )
    return written_page(runs, head, SECTIONS, requested, printed)


def runs_text(runs: Runs, requested: Sequence[str] = ()) -> Written:
    count = plural(len(runs.runs), "run")
    title = f"How do these runs compare? {count}, the newest {runs.newest.run_id}"
    return written_text(runs, [ui.Heading(title, 1)], SECTIONS, requested)


def page(compared: RunComparison) -> str:
    return runs_page(Runs(alone=compared)).text


def comment(compared: RunComparison) -> ui.Blocks:
    """Returns a pull request's comment: findings first, the rest folded."""
    unfolded = [line for line in compared.lines if line.regression or line.kind not in FOLDED]
    title = ui.Heading([compared.first, " → ", compared.second])
    blocks: ui.Blocks = [title, ui.Paragraph(strong(compared.headline))]
    if compared.differences:
        blocks.append(ui.Paragraph(f"Not the same software: {', '.join(compared.differences)}"))
    blocks += _line_blocks(compared, unfolded)
    for kind in FOLDED:
        if some := [line for line in compared.lines if line.kind == kind and line not in unfolded]:
            blocks.append(ui.Details(f"{kind}: {len(some)}", _line_blocks(compared, some)))
    if cells := disturbed(compared):
        blocks.append(ui.Details(f"disturbed trials of cells: {len(cells)}", [ui.Facts(cells)]))
    method = ui.Facts(list(compared.method.items()))
    return [*blocks, ui.Details("how it was decided", [method])]


def markdown(compared: RunComparison) -> str:
    return markdown_text(comment(compared))


def told(compared: RunComparison) -> ui.Blocks:
    """Returns what a terminal shows: everything in order, the headline last."""
    blocks: ui.Blocks = [
        ui.Paragraph(["A: ", data(compared.first)]),
        ui.Paragraph(["B: ", data(compared.second)]),
    ]
    if compared.differences:
        names = data(", ".join(compared.differences))
        blocks.append(ui.Paragraph(["different software: ", names], "caution"))
    blocks += _line_blocks(compared, [line for line in compared.lines if line.kind != "added"])
    if added := sum(line.kind == "added" for line in compared.lines):
        blocks.append(ui.Paragraph(f"added: {plural(added, 'cell')} of B, not in A"))
    if cells := disturbed(compared):
        of_regressions = sum(bool(line.disturbed) for line in compared.regressions)
        text = f"disturbed: trials of {plural(len(cells), 'cell')}"
        text += f", {of_regressions} of them regressions" if of_regressions else ""
        blocks.append(ui.Paragraph(f"{text}; the page lists them", "caution"))
    method = ui.Facts(list(compared.method.items()))
    return [*blocks, method, ui.Paragraph(strong(compared.headline))]


def _line_blocks(compared: RunComparison, lines: Sequence[ComparedCell]) -> ui.Blocks:
    measured = [line for line in lines if line.throughput]
    blocks: ui.Blocks = [_table(measured, compared.confidence)] if measured else []
    items = [
        phrase(
            ui.Span(line.kind, f"strong{' bad' if line.regression else ''}"),
            f" {line.cell_name}: {line.reason}",
        )
        for line in lines
        if not line.throughput
    ]
    return [*blocks, ui.Bullets(items)] if items else blocks
