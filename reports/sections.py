"""Sections of a report, each declared once for page and text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from harness.spec.errors import UsageError
from reports.panels import Panels

AnyReport = TypeVar("AnyReport")
Part = TypeVar("Part")
Paragraphs = list[str]
"""Markdown paragraphs, lists and tables."""


@dataclass(frozen=True)
class Section(Generic[AnyReport]):
    """A section of one kind of report.

    Its template, of the same name, shows its contents as `part`. A section without contents has no
    data and is left out.
    """

    name: str
    title: str
    html: Callable[[AnyReport, Panels], object] | None = None
    """None if pages lack this section."""
    markdown: Callable[[AnyReport], Paragraphs] | None = None
    """None if texts lack this section."""
    short: str = ""
    """Shorter title for the list of sections."""


def with_data(
    sections: Iterable[Section[AnyReport]],
    wanted: Sequence[str],
    make: Callable[[Section[AnyReport]], Part],
) -> tuple[list[tuple[Section[AnyReport], Part]], list[str]]:
    """Returns the wanted sections (all by default) with their parts, in the report's order, and the
    names of those without data.

    Raises UsageError for an unknown section, or if none of the wanted ones has data.
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
