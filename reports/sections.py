"""Sections of a report, each declared once for pages and texts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from harness.analysis.cell_result import CellResult
from harness.cell.errors import UsageError
from reports import blocks as ui
from reports.blocks import prose
from reports.columns import AnyColumn, batch_column, device_columns, table_of, word
from reports.html_writer import PageHead, PageSection, html_page
from reports.markdown_writer import markdown_text
from reports.names import cell_name

Report = TypeVar("Report")
MOST_CHARTS = 12


def setting_columns(cells: Sequence[CellResult]) -> list[AnyColumn]:
    return [
        word("Workload", "workload"),
        *device_columns(cells),
        word("Precision", "precision"),
        batch_column(),
    ]


@dataclass(frozen=True)
class Numbers(Generic[Report]):
    """A table of cells. A row is a CellResult, or something with one in its attribute `result`."""

    name: str
    label: str
    rows: Callable[[Report], Sequence[Any]]
    """Cells that have these figures, in order."""
    columns: Callable[[Sequence[Any]], Sequence[AnyColumn]]
    folded: str = "All cells in numbers"
    """Line that a reader opens to see the table; empty if it is open."""
    note: str = ""
    """Name of a text in prose.md."""
    first: Callable[[Sequence[CellResult]], Sequence[AnyColumn]] = setting_columns
    """Returns columns of the cells themselves."""

    def table(self, report: Report) -> ui.Table:
        rows = self.rows(report)
        cells = [row if isinstance(row, CellResult) else row.result for row in rows]
        first, columns = self.first(cells), self.columns(rows)
        made = [
            ui.Row(
                cell_name(cell),
                [*(head.make(cell) for head in first), *(head.make(row) for head in columns)],
                {"data-cell": cell.cell_id},
            )
            for cell, row in zip(cells, rows, strict=True)
        ]
        return table_of(self.name, self.label, "Strategy", [*first, *columns], made)

    def blocks(self, report: Report) -> ui.Blocks:
        table = self.table(report)
        noted: ui.Blocks = [ui.Part("", [table], prose(self.note))] if self.note else [table]
        return [ui.Details(self.folded, noted)] if self.folded else noted


@dataclass(frozen=True)
class Panel(Generic[Report]):
    """Charts and tables with how to read them; left out without data."""

    charts: Callable[[Report], Iterable[ui.ChartData | ui.Chart | None]] = lambda report: ()
    reading: str = ""
    """Name of a text in prose.md, next to the charts."""
    tables: Sequence[Numbers[Report]] = ()
    title: str = ""
    note: str | Callable[[Report], ui.Text] = ""
    """Name of a text in prose.md, or the text, above charts and tables."""
    more: Callable[[Report], ui.Blocks] = lambda report: []

    def blocks(self, report: Report) -> ui.Part:
        drawn = [chart for chart in self.charts(report) if chart is not None][:MOST_CHARTS]
        charts = [made if isinstance(made, ui.Chart) else ui.Chart(made) for made in drawn]
        blocks: ui.Blocks = [ui.Charts(charts, prose(self.reading) if self.reading else "")]
        blocks += [block for table in self.tables for block in table.blocks(report)]
        blocks += self.more(report)
        if isinstance(self.note, str):
            return ui.Part(self.title, blocks, prose(self.note) if self.note else "")
        return ui.Part(self.title, blocks, self.note(report))


@dataclass(frozen=True)
class Section(Generic[Report]):
    """A section of one kind of report, left out if it has no blocks."""

    name: str
    title: str
    content: Callable[[Report], Sequence[ui.Block]] | Sequence[Panel[Report]]
    short: str = ""
    in_text: bool = False
    """Whether Markdown has it too."""
    fold: Callable[[Report], str] | None = None
    """Returns the line shown while closed; empty to start open."""
    runs: Callable[[Report], bool] = lambda report: True
    """Whether a report, such as a search's, has this section."""

    def blocks(self, report: Report) -> Sequence[ui.Block]:
        if callable(self.content):
            return self.content(report)
        return [panel.blocks(report) for panel in self.content]


@dataclass(frozen=True)
class Written:
    text: str
    absent: list[str]


Filled = tuple[Section[Report], Sequence[ui.Block]]


def written_page(
    report: Report,
    head: PageHead,
    sections: Iterable[Section[Report]],
    requested: Sequence[str] = (),
    printed: bool = False,
) -> Written:
    """Returns a page of these sections (default: all); `printed`: for print.

    Raises UsageError as `_with_data` does.
    """
    filled, absent = _with_data(report, list(sections), requested, "page")
    sections_left = [
        PageSection(
            section.name,
            section.title,
            blocks,
            section.short,
            section.fold(report) if section.fold and not requested else "",
        )
        for section, blocks in filled
    ]
    closed_last = sorted(sections_left, key=lambda section: section.summary != "")
    return Written(html_page(head, closed_last, printed), absent)


def written_text(
    report: Report,
    head: Sequence[ui.Block],
    sections: Iterable[Section[Report]],
    requested: Sequence[str] = (),
) -> Written:
    """Returns the sections as Markdown; see `written_page`."""
    in_text = [section for section in sections if section.in_text]
    filled, absent = _with_data(report, in_text, requested, "text")
    blocks = list(head)
    for section, inner in filled:
        blocks += [ui.Heading(section.title, 2), *inner]
    return Written(markdown_text(blocks), absent)


def _with_data(
    report: Report, sections: Sequence[Section[Report]], requested: Sequence[str], medium: ui.Medium
) -> tuple[list[Filled[Report]], list[str]]:
    """Returns sections that have blocks, and names of empty sections. Raises UsageError for an
    unknown section, or if all sections are empty."""
    _require_known(requested, [section.name for section in sections])
    chosen = [section for section in sections if not requested or section.name in requested]
    filled = _filled(report, chosen, medium)
    present = {section.name for section, _ in filled}
    if requested and not filled:
        others = ", ".join(section.name for section, _ in _filled(report, sections, medium))
        raise UsageError(
            f"section {', '.join(requested)}: this report has no data for it; it has {others}"
        )
    return filled, [name for name in requested if name not in present]


def _filled(
    report: Report, sections: Iterable[Section[Report]], medium: ui.Medium
) -> list[Filled[Report]]:
    pairs = (
        (section, ui.visible(section.blocks(report), medium))
        for section in sections
        if section.runs(report)
    )
    return [(section, blocks) for section, blocks in pairs if blocks]


def _require_known(requested: Sequence[str], names: Collection[str]) -> None:
    for name in requested:
        if name not in names:
            raise UsageError(
                f"this report has no section {name!r}; its sections are {', '.join(names)}"
            )
