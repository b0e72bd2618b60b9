"""Writes blocks as one HTML page that loads nothing and runs only its own script."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from reports import blocks as ui
from reports import charts, text
from reports.blocks import BREAK, spans

HERE = Path(__file__).parent
FEW = 3
"""Number of charts from which they flow in columns instead of a row."""
TAGS = {"strong": "b", "em": "i", "code": "code", "small": "small"}


@dataclass(frozen=True)
class PageSection:
    """`short`: title in the navigation. `summary`: line shown while the section is collapsed; if
    empty, it starts open."""

    name: str
    title: str
    blocks: Sequence[ui.Block]
    short: str = ""
    summary: str = ""


@dataclass(frozen=True)
class PageHead:
    title: str
    heading: str
    facts: Sequence[ui.Text]
    footer: ui.Text
    cautions: Sequence[ui.Text] = ()
    navigation: bool = True


def html_page(head: PageHead, sections: Sequence[PageSection], printed: bool = False) -> str:
    """Returns a page; its policy allows style and script by hash. `printed`: for print, without
    script."""
    sections = [
        replace(visible_section, blocks=ui.visible(visible_section.blocks, "page"))
        for visible_section in sections
    ]
    data = [chart.data for section in sections for chart in charts_in(section.blocks)]
    svgs, rules = charts.draw(data)
    ids = {section.name for section in sections}
    ids |= {row.attributes.get("id", "") for section in sections for row in _rows(section.blocks)}
    writer = _HtmlWriter({f"#{name}" for name in ids}, svgs, printed)
    style = f"\n{(HERE / 'style.css').read_text(encoding='utf-8')}\n{rules}\n"
    script = f"\n{(HERE / 'script.js').read_text(encoding='utf-8')}\n"
    style = _as_printed(style) if printed else style
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src"
        f" '{'none' if printed else _digest(script)}'; base-uri 'none'; form-action 'none'"
    )
    first = sections[0]
    skip = f"the {first.name}" if first.name in ("verdict", "answer") else "the first section"
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta name="color-scheme" content="{"light" if printed else "light dark"}">',
        f"<title>{escape(head.title)}</title>\n<style>{style}</style>\n</head>\n<body>",
        f'<a class="skip" href="#{first.name}">Skip to {skip}</a>',
        f"<header>\n<h1>{escape(head.heading)}</h1>",
        f'<p class="facts">{" ".join(f"<span>{writer.text(fact)}</span>" for fact in head.facts)}',
        "</p>",
        *(writer.block(ui.Paragraph(caution, "caution")) for caution in head.cautions),
        _navigation(sections) if head.navigation else "",
        "</header>\n<main>",
        *(writer.section(section) for section in sections),
        f"</main>\n<footer><p>{writer.text(head.footer)}</p></footer>",
        "" if printed else f"<script>{script}</script>",
        "</body>\n</html>\n",
    ]
    return text.printable("\n".join(parts))


def _navigation(sections: Iterable[PageSection]) -> str:
    links, closed = "", False
    for section in sections:
        if not closed:
            closed = section.summary != ""
            title = "Everything else" if closed else section.short or section.title
            links += f'<li><a href="#{section.name}">{escape(title)}</a></li>'
    return f'<nav aria-label="Sections"><ul>{links}</ul></nav>'


def walk(blocks: Iterable[ui.Block]) -> Iterable[ui.Block]:
    for block in blocks:
        yield block
        if isinstance(block, ui.Details | ui.Box):
            yield from walk(block.blocks)


def charts_in(blocks: Iterable[ui.Block]) -> Iterable[ui.Chart]:
    for block in walk(blocks):
        if isinstance(block, ui.Charts):
            yield from block.charts


def _rows(blocks: Iterable[ui.Block]) -> Iterable[ui.Row]:
    for block in walk(blocks):
        if isinstance(block, ui.Table):
            yield from block.rows


def _as_printed(style: str) -> str:
    changes = {
        "@media screen and (prefers-color-scheme: dark)": "@media not all",
        "@media print": "@media all",
        "color-scheme: light dark": "color-scheme: light",
    }
    for before, after in changes.items():
        style = style.replace(before, after)
    return style


def _digest(content: str) -> str:
    """Returns a content security policy's source (W3C CSP 3, section 2.3.1)."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _breakable(text: str) -> str:
    """Escapes text and allows line breaks after `(`, `,`, `_` and `/`."""
    return "<wbr>".join(escape(piece) for piece in re.split(r"(?<=.[(,_/])(?=\S)", text))


def _attributes(attributes: Mapping[str, str]) -> str:
    return "".join(f' {name}="{escape(value)}"' for name, value in attributes.items() if value)


@dataclass(frozen=True)
class _HtmlWriter:
    anchors: set[str]
    pictures: Mapping[str, str]
    printed: bool

    def section(self, section: PageSection) -> str:
        head = f'<h2 id="{section.name}">{escape(section.title)}</h2>'
        blocks = self.blocks(section.blocks)
        if not section.summary:
            return f'<section aria-labelledby="{section.name}">\n{head}\n{blocks}\n</section>'
        return (
            f'<section class="closed" aria-labelledby="{section.name}">\n<details{self._opened()}>'
            f"<summary>{head} <span>{escape(section.summary)}</span></summary>\n"
            f"{blocks}\n</details>\n</section>"
        )

    def blocks(self, blocks: Iterable[ui.Block]) -> str:
        return "\n".join(map(self.block, blocks))

    def block(self, block: ui.Block) -> str:
        match block:
            case ui.Paragraph(text, kind):
                return f"<p{_attributes({'class': kind})}>{self.text(text)}</p>"
            case ui.Heading(text, level):
                return f"<h{level}>{self.text(text)}</h{level}>"
            case ui.Bullets(items, kind):
                lines = "".join(f"<li>{self.text(item)}</li>" for item in items)
                return f"<ul{_attributes({'class': kind})}>{lines}</ul>"
            case ui.Facts(rows):
                return f"<dl>{''.join(map(self._fact, rows))}</dl>"
            case ui.Table():
                return self._table(block)
            case ui.Charts():
                return self._panels(block)
            case ui.Details():
                return self._details(block)
            case ui.Box(kind, blocks):
                return f'<div class="{kind}">\n{self.blocks(blocks)}\n</div>'
            case ui.Pre(content):
                return f'<pre tabindex="0">{escape(content)}</pre>'
            case _:
                raise TypeError(f"visible() resolves {type(block).__name__}")

    def text(self, text: ui.Text) -> str:
        return "".join(map(self._span, spans(text)))

    def _span(self, span: ui.Span) -> str:
        if span is BREAK:
            return "<br>"
        styles = span.style.split()
        text = escape(span.text, quote=False)
        if "data" in styles:
            text = f"<bdi>{_breakable(span.text)}</bdi>"
        for tag in filter(None, map(TAGS.get, styles)):
            text = f"<{tag}>{text}</{tag}>"
        classes = [style for style in styles if style not in (*TAGS, "data")]
        if span.link and (span.link in self.anchors or not span.link.startswith("#")):
            text = f'<a class="name" href="{escape(span.link)}">{text}</a>'
        attributes = {"class": " ".join(classes), "title": span.tip, "data-field": span.field}
        more = _attributes(attributes)
        if span.field:
            more += f' data-value="{escape(span.value)}"'
        return f"<span{more}>{text}</span>" if more else text

    def _fact(self, row: tuple[str, ui.Text]) -> str:
        return f"<dt><bdi>{_breakable(row[0])}</bdi></dt><dd>{self.text(row[1])}</dd>"

    def _details(self, details: ui.Details) -> str:
        return (
            f"<details{self._opened()}><summary>{escape(details.summary)}</summary>\n"
            f"{self.blocks(details.blocks)}\n</details>"
        )

    def _opened(self) -> str:
        return " open" if self.printed else ""

    def _panels(self, block: ui.Charts) -> str:
        figures = "\n".join(map(self._figure, block.charts))
        reading = f"<p>{self.text(block.reading)}</p>\n" if block.reading else ""
        few = " few" if len(block.charts) < FEW else ""
        return f'{reading}<div class="panels{few}">\n{figures}\n</div>'

    def _figure(self, chart: ui.Chart) -> str:
        numbers = "".join(f"<li><bdi>{escape(name)}</bdi></li>" for name in chart.numbered)
        caption = f"<ol>{numbers}</ol>" if numbers else ""
        caption += "".join(f"<p>{escape(note)}</p>" for note in chart.data.notes)
        title = _breakable(chart.title or chart.data.title)
        return (
            f"<figure>\n<h3><bdi>{title}</bdi></h3>\n{self.pictures[chart.data.name]}\n"
            f"{f'<figcaption>{caption}</figcaption>' if caption else ''}\n</figure>"
        )

    def _table(self, table: ui.Table) -> str:
        heads = "".join(map(self._column, (ui.ColumnHead(table.first, kind=""), *table.columns)))
        grouped = any(row.group for row in table.rows)
        groups = itertools.groupby(table.rows, key=lambda row: row.group)
        bodies = "\n".join(self._body(group, rows, table) for group, rows in groups)
        filters = "" if table.filters is None else _filters(table.filters, grouped)
        return (
            f'{filters}<div class="scroll tall" role="region" aria-label="{escape(table.label)}"'
            f' tabindex="0">\n<table{_attributes({"class": table.kind, "id": table.name})}>\n'
            f"<thead><tr>{heads}</tr></thead>\n{bodies}\n</table>\n</div>"
        )

    def _body(self, group: ui.Text, rows: Iterable[ui.Row], table: ui.Table) -> str:
        heading = ""
        if group:
            heading = (
                f'<tr class="group"><th scope="rowgroup" colspan="{len(table.columns) + 1}">'
                f"<div>{self.text(group)}</div></th></tr>\n"
            )
        lines = "\n".join(map(self._row, rows))
        return f"<tbody>\n{heading}{lines}\n</tbody>"

    @staticmethod
    def _column(column: ui.ColumnHead) -> str:
        unit = f" <small>{escape(column.unit)}</small>" if column.unit else ""
        attributes = _attributes({"class": column.kind, "title": column.tip})
        return f'<th scope="col"{attributes}>{escape(column.title)}{unit}</th>'

    def _row(self, row: ui.Row) -> str:
        cells = "".join(map(self._td, row.cells))
        head = self.text(row.head)
        if row.more:
            facts = "".join(map(self._fact, row.more))
            head += f"<details{self._opened()}><summary>details</summary><dl>{facts}</dl></details>"
        return f'<tr{_attributes(row.attributes)}><th scope="row">{head}</th>{cells}</tr>'

    def _td(self, td: ui.Td) -> str:
        parts = spans(td.text)
        more = _attributes({"title": td.tip, **td.attributes})
        number = parts[0] if len(parts) == 1 and parts[0].field else None
        if number:
            field = f' data-field="{number.field}" data-value="{escape(number.value)}"'
            kind = "" if td.kind == "number" else f' class="{td.kind}"'
            return f"<td{kind}{field}{more}>{escape(number.text)}</td>"
        return f'<td class="{td.kind}"{more}>{self.text(parts)}</td>'


def _option(choice: str) -> str:
    """Returns an option whose value keeps spaces."""
    return f'<option value="{escape(choice)}">{escape(choice)}</option>'


def _filters(filters: Sequence[tuple[str, str, Sequence[str]]], grouped: bool) -> str:
    selects = "".join(
        f'<label>{title} <select data-filter="{name}"><option value="">all</option>'
        f"{''.join(map(_option, choices))}</select></label>\n"
        for name, title, choices in filters
        if len(choices) > 1
    )
    hinted = "strategy, model, host" if grouped else "strategy, option, flag"
    hint = "click a heading to sort"
    hint += " within each run" if grouped else ", tick cells to compare them"
    chosen = "" if grouped else '<div id="chosen" aria-live="polite" hidden></div>\n'
    return (
        '<div class="filters" hidden>\n<label>Search <input type="search" id="search"'
        f' placeholder="{hinted}"></label>\n{selects}<output id="shown"></output>'
        f' <button id="more" hidden></button> <span class="small">{hint}</span>\n</div>\n{chosen}'
    )
