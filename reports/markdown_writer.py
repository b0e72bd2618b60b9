"""Writes blocks without charts as Markdown, as for pull requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from reports import blocks as ui
from reports.blocks import BREAK, spans
from reports.text import printable


def markdown_text(blocks: Iterable[ui.Block]) -> str:
    return "\n\n".join(_written(ui.visible(list(blocks), "text"))) + "\n"


def escaped(text: str) -> str:
    """Escapes text so that Markdown renders it literally and mentions nobody."""
    plain = (
        re.sub(r"\s+", " ", printable(text))
        .replace("&", "&amp;")
        .replace("<", "&lt;")
        .replace(">", "&gt;")
        .replace("@", "&commat;")
    )
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", plain)


def _inline(content: ui.Text) -> str:
    parts = []
    for span in spans(content):
        text = ", " if span is BREAK else escaped(span.text)
        # Spaces between the stars and the text would show the stars.
        if "strong" in span.style.split() and text.strip():
            text = f"**{text.strip()}**"
        parts.append(text)
    return "".join(parts).strip()


def _written(blocks: Iterable[ui.Block]) -> Iterator[str]:
    for block in blocks:
        yield from filter(None, _block(block))


def _block(block: ui.Block) -> Iterable[str]:
    match block:
        case ui.Paragraph(text):
            return [_inline(text)]
        case ui.Heading(text, level):
            return [f"{'#' * level} {_inline(text)}"]
        case ui.Bullets(items):
            return ["\n".join(f"- {_inline(item)}" for item in items)]
        case ui.Facts(rows):
            return ["\n".join(f"- {escaped(name)}: {_inline(text)}" for name, text in rows)]
        case ui.Table():
            return [_table(block)]
        case ui.Details(summary, inner):
            return [
                f"<details><summary>{escaped(summary)}</summary>",
                *_written(inner),
                "</details>",
            ]
        case ui.Box(_, inner):
            return _written(inner)
        case ui.Pre(content):
            return ["\n".join(f"    {line}" for line in printable(content).splitlines())]
        case _:
            raise TypeError(f"visible() resolves {type(block).__name__}")


def _table(table: ui.Table) -> str:
    columns: Sequence[ui.ColumnHead] = (ui.ColumnHead(table.first, kind="word"), *table.columns)
    titles = [f"{head.title} ({head.unit})" if head.unit else head.title for head in columns]
    lines = [
        f"| {' | '.join(map(escaped, titles))} |",
        f"|{'|'.join('--:' if head.kind == 'number' else '---' for head in columns)}|",
    ]
    for row in table.rows:
        cells = [_inline(content) for content in (row.head, *(cell.text for cell in row.cells))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
