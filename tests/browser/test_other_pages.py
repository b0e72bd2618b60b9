"""Every kind of page in a browser: contrast, width and requests; filters of a site."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from harness.analysis.compare import compare_sides
from harness.analysis.selection import select
from harness.record.store import Store, stores_below
from reports import runs, write_whole
from reports.run_report import only
from reports.runs import runs_page
from reports.site import INDEX, write_site
from tests.browser.conftest import REFERENCE, Watched
from tests.unit.test_runs_page import DAYS, DDP, add, run_id, trials


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference runs of two machines and a made-up run."""
    made = tmp_path_factory.mktemp("made") / "results"
    add(Store(made), 0, trials(DDP, 100.0), host="elsewhere")
    folder = tmp_path_factory.mktemp("site")
    write_site([*stores_below(REFERENCE), *stores_below(made)], folder)
    return folder / INDEX


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, report: Path, site: Path) -> dict[str, Path]:
    """One page of each kind; a cell becomes slower within a week."""
    folder = tmp_path_factory.mktemp("pages")
    store = Store(folder / "results")
    for day in range(DAYS):
        add(store, day, trials(DDP, 90.0 if day >= DAYS // 2 else 100.0))
    results = store.load(steps=False)
    first, last = (select(run_id(day), only(results, [run_id(day)])) for day in (0, DAYS - 1))
    texts = {
        "runs": runs_page(runs.compare_all(results)).text,
        "compare": runs.page(compare_sides(first, last)),
    }
    found = {name: write_whole(text, folder / f"{name}.html", "") for name, text in texts.items()}
    return found | {"report": report, "site": site}


def serious_faults(page: Page) -> list[tuple[str, str, str]]:
    """Returns axe-core's serious and critical violations: rule, impact, first element. Only a few
    rows and charts of a page stay, because axe takes a minute for all."""
    page.evaluate(
        """() => {
            for (const [kind, most] of [["#all tbody tr", 12], ["svg", 3]])
                [...document.querySelectorAll(kind)].slice(most).forEach(one => one.remove());
            document.querySelectorAll("section.closed > details").forEach(one => (one.open = true));
        }"""
    )
    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [
        (one["id"], one["impact"], one["nodes"][0]["html"][:200])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("name", ["report", "runs", "compare", "site"])
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (375, "dark")])
def test_pages_are_readable_and_request_nothing(
    open_page: Callable[..., Watched], pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    opened = open_page(pages[name], width, color_scheme=scheme)
    opened.page.wait_for_timeout(100)
    assert opened.page.evaluate("() => document.documentElement.scrollWidth") <= width
    assert serious_faults(opened.page) == []
    assert opened.said == []
    assert opened.requests == [pages[name].as_uri()]


def test_a_site_is_filtered_and_sorted_within_runs(
    open_page: Callable[..., Watched], site: Path
) -> None:
    page = open_page(site).page
    rows = "#all tbody tr:not(.group)"
    whole = page.locator(rows).count()
    seen = page.locator(f"{rows}:visible")
    for name in ("model", "machine", "strategy"):
        select = page.locator(f"[data-filter={name}]")
        choices = select.locator("option").all_inner_texts()[1:]
        assert len(choices) > 1
        for choice in (choices[0], choices[-1]):
            select.select_option(choice)
            found = seen.evaluate_all(f"rows => rows.map(row => row.dataset.{name})")
            assert set(found) == {choice}
            assert len(found) < whole
            for body in page.locator("#all tbody:visible").all():
                assert body.locator("tr:not(.group):visible").count() > 0
        select.select_option("")
    page.locator("#search").fill("elsewhere")
    assert seen.count() == 1
    page.locator("#search").fill("")
    heads = page.locator("#all thead th")
    head = heads.filter(has_text="Throughput")
    column = head.evaluate("head => head.cellIndex")
    before = page.locator("#all .group").all_inner_texts()
    head.get_by_role("button").click()
    assert page.locator("#all .group").all_inner_texts() == before
    for body in page.locator("#all tbody").all():
        keys = body.locator("tr:not(.group)").evaluate_all(
            f"rows => rows.map(row => key(row, {column}))"
        )
        numbers = [float(key) for key in keys if key not in ("", "—")]
        assert numbers == sorted(numbers)
    link = seen.first.locator("a")
    link.click()
    assert "#cell-" in page.url
    assert page.locator("tr:target").count() == 1
