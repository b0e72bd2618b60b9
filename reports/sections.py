"""Sections of a report, each declared once for pages and texts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from harness.spec.errors import UsageError
from reports import blocks as ui
from reports.html_writer import PageHead, PageSection, html_page
from reports.markdown_writer import markdown_text

Report = TypeVar("Report")


@dataclass(frozen=True)
class Section(Generic[Report]):
    """A section of one kind of report, left out if it has no blocks."""

    name: str
    title: str
    blocks: Callable[[Report], Sequence[ui.Block]]
    short: str = ""
    in_text: bool = False
    """Whether Markdown has it too."""
    fold: Callable[[Report], str] | None = None
    """Returns the line shown while closed; empty to start open."""
    runs: Callable[[Report], bool] = lambda report: True
    """Whether a report, such as a search's, has this section."""


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
    shown = [
        PageSection(
            section.name,
            section.title,
            blocks,
            section.short,
            section.fold(report) if section.fold and not requested else "",
        )
        for section, blocks in filled
    ]
    closed_last = sorted(shown, key=lambda section: section.summary != "")
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
    """Returns sections with blocks, and names of empty ones.

    Raises UsageError for an unknown section, or if all are empty.
    """
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
