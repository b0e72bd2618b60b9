"""Index of a folder's reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from harness.analysis.compare import RunComparison, compare_sides
from harness.analysis.selection import RunSelection, select
from harness.record.run_record import RunRecord
from harness.spec.errors import UsageError
from harness.spec.text import plural
from reports import blocks as ui
from reports import run_facts
from reports.blocks import BREAK, data, prose, small
from reports.columns import ReportColumn
from reports.html_writer import PageHead, PageSection, html_page
from reports.names import named
from reports.run_report import RunReport, only, ran
from reports.text import DASH, listed, plain
from reports.verdict_sections import fastest, rate_text

if TYPE_CHECKING:
    from harness.record.store import Store

INDEX = "index.html"


@dataclass(frozen=True)
class Entry:
    """One run. `link`: its report, relative to the index; empty without one."""

    run: RunRecord
    link: str
    hardware: str
    verdict: str
    details: str
    failures: int
    """Launched cells without a valid result, except expected divergences."""
    cells: int
    before: str
    """Earlier run; empty if none of the matrix shares a cell."""
    change: str
    regressions: int


Earlier = Sequence[tuple[RunRecord, RunSelection]]


def entries(store: Store, folder: Path) -> list[Entry]:
    """Returns all runs, newest first. `folder`: holds the index and the reports."""
    return [entry for _, entry in reported(store, folder)][::-1]


def reported(store: Store, folder: Path) -> list[tuple[RunReport, Entry]]:
    """Returns `entries`, oldest first."""
    pairs: list[tuple[RunReport, Entry]] = []
    earlier: list[tuple[RunRecord, RunSelection]] = []
    whole = store.load(steps=False)
    for run_id in whole.runs["run_id"]:
        report = ran(only(whole, [run_id]))
        now = select(run_id, report.results)
        pairs.append((report, _entry(report, folder, *_against(earlier, report, now))))
        earlier.append((report.run, now))
    return pairs


def _against(
    earlier: Earlier, report: RunReport, now: RunSelection
) -> tuple[str, RunComparison | None]:
    for run, was in reversed(earlier):
        comparable = was.cells and now.cells and was.cells[0].comparable(now.cells[0])
        if run.matrix == report.run.matrix and comparable:
            try:
                return was.name, compare_sides(was, now)
            except UsageError:  # No cell in common.
                continue
    return "", None


def _entry(report: RunReport, folder: Path, before: str, change: RunComparison | None) -> Entry:
    words, details = _verdict(report)
    file = f"{report.run_id}.html"
    return Entry(
        report.run,
        quote(file) if (folder / file).is_file() else "",
        run_facts.hardware(report.run),
        words,
        details,
        len(report.failed),
        len(report.cells),
        before,
        change.headline if change else "",
        len(change.regressions) if change else 0,
    )


def _verdict(report: RunReport) -> tuple[str, str]:
    if largest := report.largest:
        best = largest.winner
        if best is None:
            return "nothing fits yet", ""
        return (
            f"{largest.what}: {best.label}",
            f"{plain(best.result.parameters)} {largest.unit}",
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


def page(store: Store, folder: Path) -> str:
    """Returns the index page; pages of runs that the store lacks are last."""
    shown = entries(store, folder)
    own = {f"{entry.run.run_id}.html" for entry in shown} | {INDEX}
    others = sorted(
        path.name
        for path in folder.glob("*.html")
        if path.name not in own and not path.name.endswith(".print.html")
    )
    facts: list[str] = [plural(len(shown), "run")]
    if shown:
        failing = plural(sum(entry.failures > 0 for entry in shown), "run")
        facts += [f"newest {_date(shown[0])} UTC", f"failures in {failing}"]
    footer = prose("index footer")
    title = f"Reports of {plural(len(shown), 'run')}"
    small_print = ui.Paragraph(prose("index"), "small")
    head = PageHead(title, "All reports", facts, footer, navigation=False)
    sections = [PageSection("runs", "Runs, newest first", [runs_table(shown), small_print])]
    if others:
        links = ui.Bullets([ui.Span(name, "data", quote(name)) for name in others])
        sections.append(PageSection("others", "Other pages of this folder", [links]))
    return html_page(head, sections)


def _date(entry: Entry) -> str:
    return f"{entry.run.started_at:%Y-%m-%d %H:%M}"


def runs_table(shown: Sequence[Entry], titles: Sequence[str] = ()) -> ui.Table:
    """Returns a row per run. `titles`: columns (default: all)."""
    by_title = {column.title: column for column in _COLUMNS}
    columns = [by_title[title] for title in titles or by_title]
    rows = [
        ui.Row(
            _head(entry), [column.make(entry) for column in columns], {"data-run": entry.run.run_id}
        )
        for entry in shown
    ]
    heads = [
        ui.ColumnHead(column.title, column.unit, column.tip, cell.kind.split()[0])
        for column, cell in zip(columns, rows[0].cells if rows else (), strict=bool(rows))
    ]
    return ui.Table("all-runs", "Runs, newest first", "Run", heads, rows)


def _head(entry: Entry) -> list[ui.Inline]:
    head: list[ui.Inline] = [ui.Span(_date(entry), "data", entry.link), BREAK]
    head.append(data(entry.run.run_id, "small"))
    return head if entry.link else [*head, small(", no report here")]


def _failures(entry: Entry) -> ui.Td:
    failures = ui.Span(str(entry.failures), field="failures", value=str(entry.failures))
    bad = " bad" if entry.failures else ""
    return ui.Td([failures, small(f" of {entry.cells}")], f"number{bad}")


def _change(entry: Entry) -> ui.Td:
    change: list[ui.Inline] = [DASH]
    if entry.before:
        change = [entry.change, BREAK, data(entry.before, "small")]
    return ui.Td(change, f"prose{' bad' if entry.regressions else ''}")


def _verdict_td(entry: Entry) -> ui.Td:
    words: list[ui.Inline] = [data(entry.verdict)]
    if entry.details:
        words += [BREAK, data(entry.details, "small")]
    return ui.Td(words, "prose")


def _hardware(entry: Entry) -> ui.Td:
    return ui.Td([data(entry.hardware), BREAK, data(entry.run.host, "small")], "prose")


_COLUMNS: tuple[ReportColumn[Entry], ...] = (
    ReportColumn("Failures", _failures, "of cells"),
    ReportColumn("Against the run before", _change),
    ReportColumn("Verdict", _verdict_td),
    ReportColumn("Matrix", lambda entry: ui.Td(data(entry.run.matrix), "word")),
    ReportColumn("Hardware", _hardware),
)
