"""The report of a real full run, in a browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from playwright.sync_api import Page

from harness.analysis.summary import cells
from harness.record.store import Results
from tests.browser.conftest import Watched

Open = Callable[..., Watched]


@pytest.fixture
def opened(open_page: Open, report: Path) -> Open:
    return partial(open_page, report)


@pytest.fixture
def table(opened: Open) -> Page:
    """The page with the table of all cells unfolded."""
    page = opened().page
    page.locator("summary:has(#cells)").click()
    return page


MOST_WORDS = 6000
MOST_SCREENS = 12


def test_the_report_is_read_in_two_minutes(opened: Open) -> None:
    """Counts what is visible before anything is unfolded."""
    page = opened(height=800).page
    words = page.evaluate("() => document.body.innerText.split(/\\s+/).length")
    assert 500 < words <= MOST_WORDS
    height = page.evaluate("() => document.documentElement.scrollHeight")
    assert height <= MOST_SCREENS * 800
    for line in page.locator("section.closed > details > summary > span").all_inner_texts():
        assert re.search(r"\d", line), line


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_the_first_screen_answers(opened: Open, width: int, height: int) -> None:
    """The recommendation and its price are visible without scrolling."""
    sentences = opened(width=width, height=height).page.locator(".answer li")
    roles = [text.split()[0] for text in sentences.all_inner_texts()]
    assert roles[0] == "Use"
    # "Faster at a price" follows "Use"; the names of equally fast cells come after both.
    for number in range(2 if "Faster" in roles else 1):
        box = sentences.nth(number).bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= height


def test_a_link_shows_what_is_folded_or_filtered_out(table: Page, report: Path) -> None:
    page = table
    assert not page.locator("section:has(#parity) figure").first.is_visible()
    page.locator("main a[href='#parity']").first.click()
    assert page.locator("section:has(#parity) figure").first.is_visible()
    page.goto("about:blank")
    page.goto(f"{report.as_uri()}#front")
    assert page.locator("section:has(#front) figure").first.is_visible()
    assert not page.locator("section:has(#parity) figure").first.is_visible()
    link = page.locator("section[aria-labelledby=verdict] a[href^='#cell-']").first
    target = str(link.get_attribute("href"))
    page.locator("summary:has(#cells)").click()
    page.get_by_label("Search").fill("nothing has this name")
    assert visible_rows(page) == []
    link.click()
    box = page.locator(target).bounding_box()
    assert box is not None
    assert 0 <= box["y"] < 900


def test_search_in_the_page_finds_folded_text(open_page: Open, report: Path) -> None:
    """The browser looks for a text fragment the way its own search does."""
    page = open_page(report).page
    page.goto("about:blank")
    page.goto(f"{report.as_uri()}#:~:text=Averages%20over%20N%20ranks")
    page.wait_for_function("() => document.querySelector('section:has(#glossary) details').open")


@pytest.mark.parametrize("script", [True, False])
def test_print_shows_folded_sections(opened: Open, script: bool) -> None:
    page = opened(java_script_enabled=script).page
    closed = page.locator("section:has(#glossary) dl")
    assert not closed.is_visible()
    page.emulate_media(media="print")
    if script:
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
    box = closed.bounding_box()
    assert box is not None
    assert box["height"] > 100
    if script:
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        page.emulate_media(media="screen")
        assert not closed.is_visible()


def visible_rows(page: Page) -> list[str]:
    return page.eval_on_selector_all(
        "#all tbody tr:not([hidden])", "rows => rows.map(row => row.id)"
    )


def test_cells_are_sorted_by_keyboard(table: Page, reference: Results) -> None:
    head = table.locator("#all thead th", has_text="Throughput").first
    head.get_by_role("button").focus()
    column = head.evaluate("head => head.cellIndex")
    for direction in ("ascending", "descending"):
        table.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == direction
        keys = table.eval_on_selector_all(
            "#all tbody tr", f"rows => rows.map(row => key(row, {column}))"
        )
        numbers = [float(key) for key in keys if key not in ("", "—")]
        assert numbers == sorted(numbers, reverse=direction == "descending")
        assert set(keys[len(numbers) :]) <= {"", "—"}, "unknown values stay at the end"
    assert len(numbers) == cells(reference.trials)["samples_per_second"].notna().sum()


def test_cells_are_searched_filtered_and_put_side_by_side(table: Page, reference: Results) -> None:
    page, frame = table, cells(reference.trials)
    assert len(visible_rows(page)) == len(frame)
    page.get_by_label("Search").fill("fsdp2")
    found = {f"cell-{cell}" for cell in frame[frame["label"].str.contains("fsdp2")]["cell_id"]}
    assert found <= set(visible_rows(page))
    page.locator("select[data-filter=devices]").select_option("2")
    devices = frame.set_index("cell_id")["devices"].to_dict()
    ids = [row.removeprefix("cell-") for row in visible_rows(page)]
    assert {devices[cell] for cell in ids} == {2}
    assert page.locator("#shown").inner_text() == f"{len(ids)} of {len(frame)} cells"
    for cell in ids[:2]:
        page.locator(f"#cell-{cell} input").check()
    side = page.get_by_label("The ticked cells side by side")
    first, second = frame.set_index("cell_id").loc[ids[:2], "samples_per_second"]
    ratios = side.locator("tbody tr").nth(0).locator("td").all_inner_texts()
    assert ratios == ["1.000", f"{second / first:.3f}"]
    page.get_by_role("button", name="untick all").click()
    assert side.count() == 0
