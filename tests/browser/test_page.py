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
from reports import write_report
from tests.browser.conftest import Watched, serious_faults

Open = Callable[..., Watched]


@pytest.fixture(scope="module")
def file(reference: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(reference, tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture
def opened(open_page: Open, file: Path) -> Open:
    return partial(open_page, file)


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
    open_sections = page.locator("main > section:not(.closed) h2")
    assert open_sections.evaluate_all("heads => heads.map(head => head.id)") == [
        "verdict",
        "ranking",
        "scaling",
        "failures",
    ]
    for line in page.locator("section.closed > details > summary > span").all_inner_texts():
        assert re.search(r"\d", line), line


def test_a_link_to_something_folded_opens_it(opened: Open, file: Path) -> None:
    page = opened().page
    assert not page.locator("section:has(#parity) figure").first.is_visible()
    page.locator("main a[href='#parity']").first.click()
    assert page.locator("section:has(#parity) figure").first.is_visible()
    page.evaluate("location.hash = '#method'")
    assert page.locator("section:has(#method) dl").is_visible()
    page.goto("about:blank")
    page.goto(f"{file.as_uri()}#front")
    assert page.locator("section:has(#front) figure").first.is_visible()
    assert not page.locator("section:has(#parity) figure").first.is_visible()


def test_search_in_the_page_finds_folded_text(open_page: Open, file: Path) -> None:
    """The browser looks for a text fragment the way its own search does."""
    page = open_page(file).page
    page.goto("about:blank")
    page.goto(f"{file.as_uri()}#:~:text=Averages%20over%20N%20ranks")
    page.wait_for_function("() => document.querySelector('section:has(#glossary) details').open")


@pytest.mark.parametrize("script", [True, False])
def test_print_shows_folded_sections(open_page: Open, file: Path, script: bool) -> None:
    page = open_page(file, java_script_enabled=script).page
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


def test_the_page_logs_and_requests_nothing(opened: Open, file: Path) -> None:
    one = opened()
    one.page.wait_for_timeout(200)
    assert one.said == []
    assert one.requests == [file.as_uri()]


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_first_screen_answers(opened: Open, width: int, height: int) -> None:
    """Recommendation, gain with interval, reason and main caveat are visible without scrolling."""
    page = opened(width=width, height=height).page
    sentences = page.locator(".answer li")
    roles = [text.split()[0] for text in sentences.all_inner_texts()]
    first = sentences.first
    # "Faster at a price" follows "Use"; the names of equally fast cells come after both.
    for sentence in [first, sentences.nth(1)] if "Faster" in roles else [first]:
        box = sentence.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= height
    text = first.inner_text()
    assert text.startswith("Use")
    assert "Why: " in text
    assert "95 % interval" in text
    assert "Caveat: measured on CPU cores" in text


def test_sorting(table: Page, reference: Results) -> None:
    page = table
    head = page.locator("#all thead th", has_text="Throughput").first
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    column = head.evaluate("head => head.cellIndex")
    for expected in (sorted, lambda values: sorted(values, reverse=True)):
        keys = page.eval_on_selector_all(
            "#all tbody tr", f"rows => rows.map(row => key(row, {column}))"
        )
        numbers = [float(key) for key in keys if key not in ("", "—")]
        assert numbers == expected(numbers)
        assert all(key in ("", "—") for key in keys[len(numbers) :]), (
            "unknown values stay at the end"
        )
        head.get_by_role("button").click()
    assert len(numbers) == cells(reference.trials)["samples_per_second"].notna().sum()


def test_sorting_by_keyboard(table: Page) -> None:
    page = table
    button = page.locator("#all thead th button").nth(1)
    button.focus()
    page.keyboard.press("Enter")
    assert page.locator("#all thead th").nth(1).get_attribute("aria-sort") == "ascending"


def test_search_and_filters(table: Page, reference: Results) -> None:
    page, frame = table, cells(reference.trials)
    assert len(visible_rows(page)) == len(frame)
    page.get_by_label("Search").fill("deepspeed zero")
    page.get_by_label("Search").fill("fsdp2")
    found = {f"cell-{cell}" for cell in frame[frame["label"].str.contains("fsdp2")]["cell_id"]}
    assert found <= set(visible_rows(page))
    page.locator("select[data-filter=devices]").select_option("2")
    devices = frame.set_index("cell_id")["devices"].to_dict()
    assert {devices[row.removeprefix("cell-")] for row in visible_rows(page)} == {2}
    assert page.locator("#shown").inner_text() == f"{len(visible_rows(page))} of {len(frame)} cells"


def test_a_link_finds_a_cell_that_is_filtered_out(table: Page, file: Path) -> None:
    page = table
    link = page.locator(
        "#ranking ~ * a[href^='#cell-'], section[aria-labelledby=verdict] a[href^='#cell-']"
    ).first
    target = link.get_attribute("href")
    page.get_by_label("Search").fill("nothing has this name")
    assert visible_rows(page) == []
    link.click()
    row = page.locator(f"{target}")
    assert row.is_visible()
    assert page.url.endswith(str(target))
    box = row.bounding_box()
    assert box is not None
    assert 0 <= box["y"] < 900
    page.goto(f"{file.as_uri()}{target}")
    assert page.locator(f"{target}").is_visible()


def test_cells_side_by_side(table: Page, reference: Results) -> None:
    page, frame = table, cells(reference.trials)
    best = frame[frame["ranked"]].iloc[:2]
    for cell in best["cell_id"]:
        page.locator(f"#cell-{cell} input").check()
    side = page.get_by_label("The ticked cells side by side")
    lines = side.locator("tbody tr")
    ticked = page.eval_on_selector_all(
        "#all tbody tr:has(input:checked)", "rows => rows.map(row => row.id)"
    )
    rate = frame.set_index("cell_id")["samples_per_second"]
    values = [rate[row.removeprefix("cell-")] for row in ticked]
    assert lines.nth(0).locator("td").all_inner_texts() == ["1.000", f"{values[1] / values[0]:.3f}"]
    page.get_by_role("button", name="untick all").click()
    assert side.count() == 0


@pytest.mark.parametrize("width", [375, 768, 1280])
def test_no_sideways_scroll(opened: Open, width: int) -> None:
    page = opened(width=width, height=800).page
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 375)])
def test_axe_finds_no_serious_fault(opened: Open, scheme: str, width: int) -> None:
    """Keeps only the first and last cells and their details: axe takes a minute for all."""
    page = opened(width=width, color_scheme=scheme).page
    page.evaluate(
        "() => { [...document.querySelectorAll('#all tbody tr')].slice(12, -12)"
        ".forEach(row => row.remove());"
        " document.querySelectorAll('section.closed > details')"
        ".forEach(one => (one.open = true)); }"
    )
    assert serious_faults(page) == []


def test_every_number_shown_is_the_recorded_one(opened: Open, reference: Results) -> None:
    """The whole table in the browser has the recorded values in full precision."""
    page, table = opened().page, cells(reference.trials).set_index("cell_id")
    said = page.eval_on_selector_all(
        "#all tbody tr",
        "rows => rows.map(row => [row.id.slice(5), [...row.querySelectorAll('[data-field]')]"
        ".map(s => [s.dataset.field, s.dataset.value])])",
    )
    checked = 0
    for cell, fields in said:
        for field, value in fields:
            if field in table.columns and isinstance(table.loc[cell, field], float) and value:
                assert float(value) == table.loc[cell, field], (cell, field)
                checked += 1
    assert checked > 10 * table["ranked"].sum()
