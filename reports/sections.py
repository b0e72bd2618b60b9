"""Sections of a report: each is declared once, with what makes its part of a page and of a text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from harness.spec.errors import UsageError
from reports.panels import Panels

AnyReport = TypeVar("AnyReport")
Part = TypeVar("Part")
Paragraphs = list[str]
"""Paragraphs, lists and tables in Markdown."""


@dataclass(frozen=True)
class Section(Generic[AnyReport]):
    """A section of one kind of report.

    Its part of a page is what the template of its name shows as `part`. A section is left out where
    its part is empty, which means that there is no data for it.
    """

    name: str
    title: str
    html: Callable[[AnyReport, Panels], object] | None = None
    """None: the page does not have this section."""
    markdown: Callable[[AnyReport], Paragraphs] | None = None
    """None: the text does not have this section."""
    short: str = ""
    """The title in the list of sections, where it is shorter there."""


def with_data(
    sections: Iterable[Section[AnyReport]],
    wanted: Sequence[str],
    make: Callable[[Section[AnyReport]], Part],
) -> tuple[list[tuple[Section[AnyReport], Part]], list[str]]:
    """The wanted sections (all, where none is named) with their parts, in the order of the report;
    and the names of those for which there is no data.

    Raises UsageError for a section that no report of this kind has, and where there is data for
    none of the wanted ones.
    """
    sections = list(sections)
    _require_known(wanted, [section.name for section in sections])
    chosen = [section for section in sections if not wanted or section.name in wanted]
    parts = [(section, part) for section in chosen if (part := make(section))]
    there = [section.name for section, _ in parts]
    if wanted and not parts:
        others = [section.name for section in sections if make(section)]
        raise UsageError(
            f"section {', '.join(wanted)}: this report has no data for it; it has"
            f" {', '.join(others)}"
        )
    return parts, [name for name in wanted if name not in there]


def _require_known(wanted: Sequence[str], names: Collection[str]) -> None:
    for name in wanted:
        if name not in names:
            raise UsageError(
                f"{name!r} is no section of this report; its sections are {', '.join(names)}"
            )
