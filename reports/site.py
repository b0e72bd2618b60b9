"""The index of runs, of one folder or of several machines, with the cells of reported runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from harness.analysis.cell_result import CellResult
from harness.analysis.compare import RunComparison, compare_sides
from harness.analysis.selection import RunSelection, select
from harness.cell.errors import DamagedRun, UsageError, plural
from harness.record.run_record import RunRecord
from harness.record.trial import NOT_LAUNCHED
from reports import blocks as ui
from reports import run_facts, write_report, write_whole
from reports.blocks import BREAK, data, phrase, prose, small, strong
from reports.cells_sections import parity_td
from reports.columns import ReportColumn, interval, over_baseline, size_column, throughput_of, word
from reports.html_writer import PageHead, PageSection, html_page
from reports.names import device_words, named
from reports.run_report import RunReport, only, ran
from reports.text import DASH, listed, plain
from reports.verdict_sections import fastest, rate_text

if TYPE_CHECKING:
    from harness.record.store import Store

INDEX = "index.html"
FILTERS = {"model": "Model", "machine": "GPU and host", "strategy": "Strategy"}


@dataclass(frozen=True)
class Entry:
    """One run of the index."""

    report: RunReport
    link: str
    """Its report, relative to the index; empty without one."""
    before: str
    """Name of the earlier run; empty if no run of the matrix shares a cell."""
    change: RunComparison | None
    """Comparison with the earlier run."""

    @property
    def run(self) -> RunRecord:
        return self.report.run

    @property
    def started(self) -> str:
        return f"{self.run.started_at:%Y-%m-%d %H:%M}"

    @property
    def machine(self) -> str:
        return f"{run_facts.hardware(self.run)}, host {self.run.host}"


def write_site(stores: Sequence[Store], folder: Path, instead: str = "") -> list[Entry]:
    """Writes a report per run and the index; returns its runs, newest first.

    `instead`: the command that a message about a failure shows.

    Raises UsageError if two different runs share an id, if a run has values that cannot be
    reported, or if a file cannot be written.
    """
    reported = []
    for store, run_ids in _distinct(stores):
        # Other people's records may have any values.
        try:
            for run_id in run_ids:
                write_report(store.load([run_id], steps=False), folder / f"{run_id}.html", instead)
            found = entries(store, folder)
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise DamagedRun(
                f"{str(store.folder)!r} has a run with values that cannot be reported"
                f" ({type(error).__name__})"
            ) from error
        reported += [entry for entry in found if entry.run.run_id in run_ids]
    reported.sort(key=lambda entry: entry.run.started_at, reverse=True)
    write_whole(page(reported, folder), folder / INDEX, instead)
    return reported


def _distinct(stores: Iterable[Store]) -> list[tuple[Store, list[str]]]:
    seen: dict[str, tuple[Store, tuple[object, object]]] = {}
    chosen = []
    for store in stores:
        new = []
        for run_id in store.run_ids():
            row = store.run_row(run_id)
            origin = row["host"], row["started_at"]
            earlier, first = seen.setdefault(run_id, (store, origin))
            if earlier is store:
                new.append(run_id)
            elif first != origin:
                raise UsageError(
                    f"{str(earlier.folder)!r} and {str(store.folder)!r} each have a run {run_id!r},"
                    " but of different machines or times; leave one of them out"
                )
        chosen.append((store, new))
    return chosen


def entries(store: Store, folder: Path) -> list[Entry]:
    """Returns all runs, newest first. `folder`: holds the index and the reports."""
    found: list[Entry] = []
    earlier: list[tuple[RunRecord, RunSelection]] = []
    whole = store.load(steps=False)
    for run_id in whole.runs["run_id"]:
        report = ran(only(whole, [run_id]))
        now, file = select(run_id, report.results), f"{run_id}.html"
        link = quote(file) if (folder / file).is_file() else ""
        found.append(Entry(report, link, *_against(earlier, report, now)))
        earlier.append((report.run, now))
    return found[::-1]


def _against(
    earlier: Sequence[tuple[RunRecord, RunSelection]], report: RunReport, now: RunSelection
) -> tuple[str, RunComparison | None]:
    for run, was in reversed(earlier):
        comparable = was.cells and now.cells and was.cells[0].comparable(now.cells[0])
        if run.matrix == report.run.matrix and comparable:
            try:
                return was.name, compare_sides(was, now)
            except UsageError:  # No cell in common.
                continue
    return "", None


def verdict_of(report: RunReport) -> tuple[str, str]:
    """Returns what a run advises, and its figures."""
    if largest := report.largest:
        best = largest.winner
        if best is None:
            return "nothing fits yet", ""
        return (
            f"{largest.growth.what}: {best.label}",
            f"{plain(best.result.parameters)} {largest.growth.unit}",
        )
    group = report.leading
    if group is None:
        return "nothing is ranked", ""
    cell, tied = fastest(group)
    alike = f"; tied with {listed([named(c, place=False) for c in tied], 3)}" if tied else ""
    return (
        f"{'use' if group.advised else 'fastest:'} {named(cell, place=False)}",
        f"{rate_text(group, cell)}{alike}; {group.workload}, {group.title}",
    )


def page(reported: Sequence[Entry], folder: Path) -> str:
    """Returns the index of these runs; other pages of the folder are last."""
    ours = {f"{entry.run.run_id}.html" for entry in reported} | {INDEX}
    others = sorted(
        path.name
        for path in folder.glob("*.html")
        if path.name not in ours and not path.name.endswith(".print.html")
    )
    by_machine = sorted(reported, key=lambda entry: entry.machine)
    rows = [row for entry in by_machine if entry.link for row in _rows(entry)]
    machines = {entry.machine for entry in reported}
    facts = [plural(len(reported), "run"), plural(len(machines), "machine")]
    facts += [plural(len(rows), "cell")] if rows else []
    if reported:
        failing = plural(sum(bool(entry.report.failed) for entry in reported), "run")
        facts += [f"newest {reported[0].started} UTC", f"failures in {failing}"]
    runs: ui.Blocks = [_runs_table(reported), ui.Paragraph(prose("index"), "small")]
    sections = [PageSection("runs", "Runs, newest first", runs)]
    if rows:
        heads = [ui.ColumnHead(column.title, column.unit, column.tip, "") for column in _COLUMNS]
        filters = [
            (name, title, sorted({row.attributes[f"data-{name}"] for row in rows}))
            for name, title in FILTERS.items()
        ]
        table = ui.Table("all", "All cells", "Strategy", heads, rows, "sortable full", filters)
        blocks: ui.Blocks = [ui.Paragraph(prose("site"), "small"), table]
        sections.append(PageSection("cells", "Cells by run", blocks))
    if others:
        links = ui.Bullets([ui.Span(name, "data", quote(name)) for name in others])
        sections.append(PageSection("others", "Other pages of this folder", [links]))
    title = f"Reports of {plural(len(reported), 'run')}"
    head = PageHead(title, "All reports", facts, prose("index footer"), navigation=False)
    return html_page(head, sections)


def _runs_table(entries: Sequence[Entry]) -> ui.Table:
    columns = [
        ui.ColumnHead("Failures", "of cells"),
        *ui.heads("Against the run before: prose", "Verdict: prose", "Matrix: word"),
        *ui.heads("Hardware: prose"),
    ]
    rows = [
        ui.Row(
            _head(entry),
            [
                _failures(entry.report),
                _change(entry),
                ui.Td(_two_lines(*verdict_of(entry.report)), "prose"),
                ui.Td(data(entry.run.matrix), "word"),
                ui.Td(_two_lines(run_facts.hardware(entry.run), entry.run.host), "prose"),
            ],
            {"data-run": entry.run.run_id},
        )
        for entry in entries
    ]
    return ui.Table("all-runs", "Runs, newest first", "Run", columns, rows)


def _two_lines(first: str, second: str) -> list[ui.Inline]:
    return [data(first), *([BREAK, data(second, "small")] if second else [])]


def _head(entry: Entry) -> list[ui.Inline]:
    head: list[ui.Inline] = [ui.Span(entry.started, "data", entry.link), BREAK]
    head.append(data(entry.run.run_id, "small"))
    return head if entry.link else [*head, small(", no report here")]


def _failures(report: RunReport) -> ui.Td:
    """Returns the number of launched cells without a valid result, except expected divergences."""
    count = str(len(report.failed))
    text: list[ui.Inline] = [
        ui.Span(count, field="failures", value=count),
        small(f" of {len(report.cells)}"),
    ]
    return ui.Td(text, f"number{' bad' if report.failed else ''}")


def _change(entry: Entry) -> ui.Td:
    if entry.change is None:
        return ui.Td(DASH, "prose")
    text: list[ui.Inline] = [entry.change.headline, BREAK, data(entry.before, "small")]
    return ui.Td(text, f"prose{' bad' if entry.change.regressions else ''}")


_COLUMNS: tuple[ReportColumn[CellResult], ...] = (
    word("Model", "workload"),
    ReportColumn(
        "Throughput",
        lambda cell: interval(cell, throughput_of(cell), with_unit=True),
        "95% interval",
        "of this machine; compare within a run",
    ),
    ReportColumn("Over baseline", over_baseline, "95% interval", "in the same run and setting"),
    size_column("Peak memory", "peak_memory_bytes", "fullest device, largest of the trials"),
    ReportColumn("Parity", parity_td, "or status", "whether it trained the same as the reference"),
)


def _rows(entry: Entry) -> list[ui.Row]:
    report = entry.report
    if report.is_search:
        return []
    group = _heading(entry)
    ranked = [cell for ranked_group in report.groups for cell in ranked_group.rows]
    seen = {cell.cell_id for cell in ranked}
    rest = [cell for cell in report.cells if cell.cell_id not in seen]
    return [
        ui.Row(
            _name(cell, entry.link),
            [column.make(cell) for column in _COLUMNS],
            {
                "class": "" if cell.ranked else "unranked",
                "data-model": cell.cell.workload_name,
                "data-machine": entry.machine,
                "data-strategy": cell.cell.strategy,
            },
            group,
        )
        for cell in (*ranked, *rest)
        if cell.status not in NOT_LAUNCHED
    ]


def _name(cell: CellResult, report: str) -> list[ui.Inline]:
    weak = ", weak" if cell.cell.regime == "weak" else ""
    setting = f"{device_words(cell)}, {cell.cell.precision}, batch {cell.cell.global_batch}{weak}"
    name = ui.Span(named(cell), "data", f"{report}#cell-{cell.cell_id}")
    return [name, BREAK, data(setting, "small")]


def _heading(entry: Entry) -> ui.Text:
    run = entry.run
    return phrase(
        strong(run_facts.hardware(run)),
        small(f", host {run.host}, {run.started_at:%Y-%m-%d}, PyTorch {run.torch_version}, "),
        ui.Span(f"report of {run.run_id}", "data small", entry.link),
        BREAK,
        data(", ".join(filter(None, verdict_of(entry.report)))),
    )
