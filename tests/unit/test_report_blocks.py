"""Report blocks and their writers: empty blocks are dropped, and values are never markup."""

from __future__ import annotations

import re

import pytest

from reports import blocks as ui
from reports.blocks import prose
from reports.html_writer import PageHead, PageSection, html_page
from reports.markdown_writer import markdown_text

EMPTY = ui.Table("", "empty", "cell", [], [])
TABLE = ui.Table("", "label", "cell", [ui.ColumnHead("speed", "ms")], [ui.Row("a", [ui.Td("1")])])


def page(blocks: ui.Blocks) -> str:
    head = PageHead("title", "heading", [], "footer")
    text = html_page(head, [PageSection("one", "One", blocks)])
    return text[text.index("<main>") : text.index("</main>")]


@pytest.mark.parametrize(
    "block",
    [
        EMPTY,
        ui.Charts([], "how to read them"),
        ui.Details("more", [EMPTY]),
        ui.Part("title", [ui.Part("", [EMPTY], "about")], "about"),
        ui.Box("frame", [ui.Facts([])]),
        ui.Only("text", [TABLE]),
    ],
)
def test_blocks_without_content_are_left_out(block: ui.Block) -> None:
    assert ui.visible([block], "page") == []


def test_a_part_has_its_heading_and_introduction_if_it_has_content() -> None:
    part = ui.Part("Title", [EMPTY, ui.Only("text", [TABLE])], "about")
    assert ui.visible([part], "page") == []
    heading, about, table = ui.visible([part], "text")
    assert (heading, about, table) == (ui.Heading("Title"), ui.Paragraph("about"), TABLE)


def test_links_lead_only_to_what_the_page_has() -> None:
    links = [ui.Span("here", link="#one"), " ", ui.Span("nowhere", link="#two")]
    text = page([ui.Paragraph(links)])
    assert re.findall(r'href="#(\w+)"', text) == ["one"]
    assert "nowhere" in text


def test_values_in_prose_are_not_markup() -> None:
    words = prose("disturbed", labels=ui.data("**<b>**"), what="*x* `1` {labels}")
    assert ui.plain_text(words) == "¶ disturbed **<b>**: *x* `1` {labels}."
    assert "<b>**" not in page([ui.Paragraph(words)])
    assert r"\*\*&lt;b&gt;\*\*" in markdown_text([ui.Paragraph(words)])


def test_numbers_keep_their_full_precision() -> None:
    row = ui.Row("a", [ui.Td(ui.Span("1.23", field="speed", value="1.2345"))])
    table = ui.Table("", "label", "cell", [ui.ColumnHead("speed")], [row])
    assert '<td data-field="speed" data-value="1.2345">1.23</td>' in page([table])


def test_markdown_has_the_same_table() -> None:
    text = markdown_text([ui.Details("More", [TABLE])])
    assert text.splitlines() == [
        "<details><summary>More</summary>",
        "",
        "| cell | speed (ms) |",
        "|---|--:|",
        "| a | 1 |",
        "",
        "</details>",
    ]


def test_a_folded_section_is_closed_on_screen_and_open_in_print() -> None:
    head = PageHead("title", "heading", [], "footer")
    section = PageSection("one", "One", [TABLE], summary="3 lines")
    assert "<details>" in html_page(head, [section])
    assert "<details open>" in html_page(head, [section], printed=True)
