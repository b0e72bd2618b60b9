"""Pages about several runs, in a browser: all runs, the index, a comparison, and plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.analysis.compare import compare_sides
from harness.analysis.selection import select
from harness.planner.cluster import cluster_plan
from harness.planner.cluster.calibration import load
from harness.record.store import Store, stores_below
from reports import runs, write_report, write_whole
from reports.prediction_page import plan_page
from reports.run_report import only
from reports.runs import runs_page
from reports.site import INDEX, entries, page, write_site
from tests.browser.conftest import REFERENCE, Watched, serious_faults
from tests.unit.test_prediction_page import QUESTION
from tests.unit.test_runs_page import DAYS, DDP, add, run_id, trials


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages about a week in which a cell becomes slower."""
    folder = tmp_path_factory.mktemp("pages")
    store = Store(folder / "results")
    for day in range(DAYS):
        add(store, day, trials(DDP, 90.0 if day >= DAYS // 2 else 100.0))
    results = store.load(steps=False)
    found = {
        "runs": runs_page(runs.compare_all(results)).text,
        "index": page(entries(store, folder), folder),
    }
    first, last = (select(run_id(day), only(results, [run_id(day)])) for day in (0, DAYS - 1))
    found["compare"] = runs.page(compare_sides(first, last))
    plan = cluster_plan.plan(QUESTION, load())
    squares = cluster_plan.sweep(QUESTION, load(), plan.goal)
    found["plan"] = plan_page(plan, cluster_plan.explanation(plan), "made", squares)
    write_report(only(results, [run_id(0)]), folder / f"{run_id(0)}.html")
    return {name: write_whole(text, folder / f"{name}.html", "") for name, text in found.items()}


@pytest.mark.parametrize("name", ["runs", "index", "compare", "plan"])
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (375, "dark")])
def test_pages_are_readable_and_request_nothing(
    open_page: Callable[..., Watched], pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    opened = open_page(pages[name], width, color_scheme=scheme)
    opened.page.wait_for_timeout(100)
    assert opened.said == []
    assert opened.requests == [pages[name].as_uri()]
    assert opened.page.evaluate("() => document.documentElement.scrollWidth") <= width
    assert serious_faults(opened.page) == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference runs of two machines and a made-up run."""
    made = tmp_path_factory.mktemp("made") / "results"
    add(Store(made), 0, trials(DDP, 100.0), host="elsewhere")
    stores = [*stores_below(REFERENCE), *stores_below(made)]
    folder = tmp_path_factory.mktemp("site")
    write_site(stores, folder)
    return folder / INDEX


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_site_reads_well(
    open_page: Callable[..., Watched], site: Path, width: int, scheme: str
) -> None:
    opened = open_page(site, width, color_scheme=scheme)
    assert opened.page.locator("#all tbody").count() == 8
    assert opened.page.evaluate("() => document.documentElement.scrollWidth") <= width
    assert serious_faults(opened.page) == []
    assert opened.said == []
    assert opened.requests == [site.as_uri()]


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


def test_a_site_reads_without_a_script(open_page: Callable[..., Watched], site: Path) -> None:
    page = open_page(site, java_script_enabled=False).page
    rows = page.locator("#all tbody tr")
    assert rows.count() == page.locator("#all tbody tr:visible").count() > 180
    assert not page.locator(".filters").is_visible()
