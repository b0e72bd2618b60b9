"""Blocks of pages and texts."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Span:
    """Text in one style, or a number with its full precision.

    `style`: `strong`, `em`, `code`, `small`, `data` (recorded text), or CSS classes. `link`:
    URL, or `#name`, dropped if the page lacks it. `field`, `value`: a number's name and full value.
    """

    text: str
    style: str = ""
    link: str = ""
    tip: str = ""
    field: str = ""
    value: str = ""


Inline: TypeAlias = str | Span
Text: TypeAlias = Inline | Sequence[Inline]
BREAK = Span("", "break")
"""A line break in HTML, `, ` in Markdown."""


def spans(content: Text) -> list[Span]:
    if isinstance(content, Span):
        return [content]
    if isinstance(content, str):
        return [Span(content)]
    return [Span(word) if isinstance(word, str) else word for word in content]


def plain_text(content: Text) -> str:
    return "".join(", " if span is BREAK else span.text for span in spans(content))


def phrase(*parts: Text) -> list[Inline]:
    return [span for part in parts for span in spans(part)]


def data(text: str, style: str = "") -> Span:
    """Isolates recorded text, so that right-to-left characters do not reorder the page."""
    return Span(text, f"data {style}".strip())


def strong(text: str) -> Span:
    return Span(text, "strong")


def small(text: str) -> Span:
    return Span(text, "small")


def key(kind: str) -> Span:
    return Span("", f"key {kind}")


def joined(items: Sequence[Text], between: Text = ", ") -> list[Inline]:
    return phrase(*(part for item in items for part in (between, item)))[len(spans(between)) :]


_MARKUP = re.compile(
    r"\*\*(?P<strong>.+?)\*\*|\*(?P<em>.+?)\*|`(?P<code>.+?)`"
    r"|\[(?P<linked>[^]]+)\]\((?P<link>[^)]+)\)|\[(?P<key>[\w -]+)\]"
)


def prose(name: str, **values: Text | int) -> list[Inline]:
    """Returns a text of prose.md; inserted values are not interpreted."""
    template, result, end = _prose()[name], [], 0
    for match in _MARKUP.finditer(template):
        result += _filled(template[end : match.start()], "", values)
        kind, end = match.lastgroup, match.end()
        if kind == "key":
            result.append(key(match["key"]))
        elif kind == "link":
            result.append(Span(match["linked"], link=match["link"]))
        elif kind:
            result += _filled(match[kind], kind, values)
    return result + _filled(template[end:], "", values)


def _filled(template: str, style: str, values: Mapping[str, Text | int]) -> list[Inline]:
    result: list[Inline] = []
    for index, part in enumerate(re.split(r"\{(\w+)\}", template)):
        value: Text | int = values[part] if index % 2 else part
        if isinstance(value, str | int):
            result += [Span(f"{value}", style)] if value != "" else []
        else:
            result += spans(value)
    return result


def prose_under(name: str) -> list[tuple[str, Text]]:
    """Returns texts of prose.md that begin with `name`."""
    names = [title for title in _prose() if title.startswith(f"{name} ")]
    return [(title.removeprefix(f"{name} "), prose(title)) for title in names]


@functools.cache
def _prose() -> dict[str, str]:
    text = (Path(__file__).parent / "prose.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return {name: " ".join(prose_text.split()) for name, prose_text in pairs}


class ChartData(Protocol):
    @property
    def name(self) -> str:
        """HTML id, unique in the page."""

    @property
    def title(self) -> str: ...

    @property
    def summary(self) -> str:
        """Text for screen readers."""

    @property
    def notes(self) -> tuple[str, ...]: ...

    def draw(self) -> Figure: ...


@dataclass(frozen=True)
class Paragraph:
    text: Text
    kind: str = ""
    """lead, small, caution, legend or tied."""


@dataclass(frozen=True)
class Heading:
    text: Text
    level: int = 3


@dataclass(frozen=True)
class Bullets:
    items: Sequence[Text]
    kind: str = ""


@dataclass(frozen=True)
class Facts:
    rows: Sequence[tuple[str, Text]]


@dataclass(frozen=True)
class Td:
    """`kind`: number, word, prose, flags, good or bad."""

    text: Text
    kind: str = "number"
    tip: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ColumnHead:
    title: str
    unit: str = ""
    tip: str = ""
    kind: str = "number"


def heads(*columns: str) -> list[ColumnHead]:
    """Parses `title (unit): kind`; the default kind is number."""
    parts = [re.fullmatch(r"(.+?)(?: \((.+)\))?(?:: (\w+))?", column) for column in columns]
    return [ColumnHead(p[1], p[2] or "", "", p[3] or "number") for p in parts if p]


@dataclass(frozen=True)
class Row:
    head: Text
    cells: Sequence[Td]
    attributes: Mapping[str, str] = field(default_factory=dict)
    """`id`, `class` and `data-` attributes."""
    group: Text = ""
    """Heading of consecutive rows sorted together."""
    more: Sequence[tuple[str, Text]] = ()
    """Details that a reader unfolds in the row."""


@dataclass(frozen=True)
class Table:
    """`label`: for screen readers. `kind`: CSS classes. `filters`: (attribute, title, choices)."""

    name: str
    label: str
    first: str
    columns: Sequence[ColumnHead]
    rows: Sequence[Row]
    kind: str = "sortable compact"
    filters: Sequence[tuple[str, str, Sequence[str]]] | None = None


@dataclass(frozen=True)
class Chart:
    data: ChartData
    title: str = ""
    """Heading; empty for the title of `data`."""
    numbered: tuple[str, ...] = ()
    """Names of the chart's numbered points, from 1."""


@dataclass(frozen=True)
class Charts:
    """Charts in a row, not in Markdown. `reading`: how to read them."""

    charts: Sequence[Chart]
    reading: Text = ""


@dataclass(frozen=True)
class Details:
    """Blocks folded until a reader opens them."""

    summary: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Box:
    """Blocks in a frame. `kind`: its CSS classes."""

    kind: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Part:
    """Blocks with a heading and introduction; left out if empty."""

    title: Text
    blocks: Sequence[Block]
    about: Text = ""


@dataclass(frozen=True)
class Pre:
    text: str


Medium: TypeAlias = Literal["page", "text"]


@dataclass(frozen=True)
class Only:
    medium: Medium
    blocks: Sequence[Block]


Block: TypeAlias = (
    Paragraph | Heading | Bullets | Facts | Table | Charts | Details | Box | Part | Pre | Only
)
Blocks: TypeAlias = list[Block]


def visible(blocks: Sequence[Block], medium: Medium) -> Blocks:
    """Returns the non-empty blocks that a medium shows; replaces parts by their contents."""
    blocks_left: Blocks = []
    for block in blocks:
        match block:
            case Only(own, inner):
                blocks_left += visible(inner, medium) if own == medium else []
            case Part(title, inner, about):
                if rest := visible(inner, medium):
                    blocks_left += [Heading(title)] if title else []
                    blocks_left += [Paragraph(about)] if about else []
                    blocks_left += rest
            case Details(_, inner) | Box(_, inner):
                if rest := visible(inner, medium):
                    blocks_left.append(replace(block, blocks=rest))
            case Charts(charts):
                blocks_left += [block] if charts and medium == "page" else []
            case Table():
                blocks_left += [block] if block.rows else []
            case Facts(content) | Bullets(content):
                blocks_left += [block] if content else []
            case _:
                blocks_left.append(block)
    return blocks_left
