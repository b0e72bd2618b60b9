"""Markdown text and tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

from reports.text import printable


def escaped(text: str) -> str:
    """Escapes text, so that Markdown renders it literally and mentions nobody."""
    plain = (
        " ".join(printable(text).split())
        .replace("&", "&amp;")
        .replace("<", "&lt;")
        .replace(">", "&gt;")
        .replace("@", "&commat;")
    )
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", plain)


def table(columns: Sequence[str], numbers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table of unescaped texts; columns in `numbers` are right-aligned."""
    lines = [
        f"| {' | '.join(map(escaped, columns))} |",
        f"|{'|'.join('--:' if column in numbers else '---' for column in columns)}|",
    ]
    lines += [f"| {' | '.join(escaped(word) for word in row)} |" for row in rows]
    return "\n".join(lines)
