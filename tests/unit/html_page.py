"""HTML pages, parsed roughly like a browser does, and hostile texts."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

from harness.record.store import Results
from reports import write_report


class Page(HTMLParser):
    """A page's tags with attributes, table rows and visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: dict[str, dict[str, str]] = {}
        self.grids: list[tuple[str, str, str]] = []
        """Cell id, field and value of each number in the small tables."""
        self.words: list[str] = []
        self._row = self._line = ""
        self._skipping = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag == "tr":
            self._row, self._line = found.get("id") or "", found.get("data-cell") or ""
        if self._row and found.get("data-field"):
            self.rows.setdefault(self._row, {})[str(found["data-field"])] = (
                found["data-value"] or ""
            )
        if self._line and found.get("data-field"):
            self.grids.append((self._line, str(found["data-field"]), found["data-value"] or ""))
        self._skipping = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._skipping = False
        if tag not in ("a", "b", "bdi"):
            self.words.append(" ")
        if tag == "tr":
            self._row = self._line = ""

    def handle_data(self, data: str) -> None:
        if not self._skipping:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    @property
    def headings(self) -> list[str]:
        return [str(a["id"]) for tag, a in self.tags if tag == "h2"]


def page_of(results: Results, folder: Path) -> Page:
    return Page(write_report(results, folder / "page.html").read_text())


def content_policy(text: str, *tags: str) -> str:
    """Returns the page's Content-Security-Policy; asserts that it allows the only element of each
    tag by hash."""
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    for tag in tags:
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    return policy


def loads_nothing(text: str) -> None:
    """Asserts that the page loads nothing and runs only its own script."""
    page = Page(text)
    assert not re.search(r"https?://|url\((?!#)|@import", text)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not {"img", "iframe", "object"} & {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
    policy = content_policy(text)
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy


def shows_as_text(hostile: str, page_text: str) -> None:
    """Asserts that the page shows the text without interpreting it."""
    loads_nothing(page_text)
    page = Page(page_text)
    assert "1337" not in page.text
    assert not set(page.text) & set("\x00\x08\x1b\u202e")
    if hostile.isprintable():
        assert " ".join(hostile.split())[:200] in page.text


HOSTILE = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror=alert(1)>'",
    "{{ 7 * 191 }} $\\frac{1}{0}$ ]]> &amp;",
    "\u202egnp.exe \u05e9\u05dc\u05d5\u05dd",
    "\x00\x08\x1b[31m",
    "x" * 3000,
)
