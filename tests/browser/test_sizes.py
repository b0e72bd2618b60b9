"""Reports of hostile and very large runs, in a browser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from harness.cell.cell import Cell
from harness.record.run_record import RunRecord
from harness.record.store import Store, load
from harness.record.trial import TrialRecord
from reports import write_report
from tests.browser.conftest import Watched
from tests.unit.html_page import HOSTILE
from tests.unit.stored_trials import frame_of, one_cell_run, trial_row

FEW = 200


@pytest.fixture(scope="module", params=[700, pytest.param(5000, marks=pytest.mark.thorough)])
def cells(request: pytest.FixtureRequest) -> int:
    """Number of cells in the run."""
    return int(request.param)


@pytest.fixture(scope="module")
def page_of_many(cells: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report of the cells. `make bench` limits the time and memory that a large run takes."""
    folder = tmp_path_factory.mktemp("many")
    Store(folder / "results").write_run(RunRecord(**one_cell_run()))
    rows = [
        trial_row(
            Cell(
                strategy=("ddp", "fsdp2", "deepspeed")[number % 3],
                devices=2,
                options={"size": float(number)},
                global_batch=8 + number // 500,
            ),
            samples_per_second=100.0 + number % 97,
            tokens_per_second=64 * (100.0 + number % 97),
            peak_memory_bytes=2**28 + 2**16 * (number % 89),
        )
        for number in range(cells)
    ]
    run = load(folder / "results")
    page = write_report(replace(run, trials=frame_of(rows)), folder / "page.html")
    assert page.stat().st_size < 8 * 2**20
    return page


def visible(page: Page) -> list[str]:
    """Returns the ids of the rows that take up space on the screen, in order."""
    return page.eval_on_selector_all(
        "#all tbody tr", "rows => rows.filter(row => row.offsetHeight).map(row => row.id)"
    )


def test_a_page_shows_the_first_of_many_cells_and_filters_sorts_and_prints_all(
    open_page: Callable[..., Watched], cells: int, page_of_many: Path
) -> None:
    opened = open_page(page_of_many, height=720)
    page = opened.page
    page.locator("summary:has(#cells)").click()
    assert len(visible(page)) == FEW
    assert page.locator("output#shown").inner_text() == (
        f"{cells} of {cells} cells, the first {FEW} shown"
    )
    page.get_by_label("Search").fill("fsdp2")
    fitting = len(range(1, cells, 3))
    page.get_by_role("button", name=f"show all {fitting}").click()
    assert len(visible(page)) == fitting
    page.get_by_label("Search").fill("")
    head = page.locator("#all thead th", has_text="Peak memory")
    head.get_by_role("button").dblclick()
    rows = page.locator("#all tbody tr")
    values = rows.evaluate_all(
        "rows => rows.map(row =>"
        " Number(row.querySelector('[data-field=peak_memory_bytes]').dataset.value))"
    )
    assert values == sorted(values, reverse=True)
    assert len(values) == cells
    assert visible(page) == rows.evaluate_all("rows => rows.map(row => row.id)")[:FEW]
    page.emulate_media(media="print")
    assert len(visible(page)) == cells
    assert opened.said == []


def test_a_link_to_one_of_many_cells_finds_it_also_without_a_script(
    open_page: Callable[..., Watched], page_of_many: Path
) -> None:
    for script in (True, False):
        page = open_page(page_of_many, height=720, java_script_enabled=script).page
        last = page.locator("#all tbody tr").last.get_attribute("id")
        if not script:
            page.locator("summary:has(#cells)").click()
        page.goto(f"{page_of_many.as_uri()}#{last}")
        box = page.locator(f"#{last}").bounding_box()
        assert box is not None
        assert not script or 0 <= box["y"] < 720


def test_text_of_a_hostile_run_is_escaped(
    open_page: Callable[..., Watched], tmp_path: Path
) -> None:
    """Every text of the run is hostile."""
    store = Store(tmp_path / "results")
    run = dict(zip(("host", "matrix", "cpu_model"), HOSTILE, strict=False))
    store.write_run(RunRecord(**one_cell_run() | run))
    for text in (*HOSTILE, "", "nan"):
        cell = Cell(strategy=text or "empty", options={text or "none": text}, devices=2)
        names = ("cell_name", "label", "system", "reason", "stand_in", "log_tail")
        odd: dict[str, Any] = dict.fromkeys(names, text)
        store.write_trial(TrialRecord(**trial_row(cell, **odd)))
        odd |= {"status": "failed", "samples_per_second": float("nan"), "parity_verdict": None}
        broken = cell.model_copy(update={"seed": 1})
        store.write_trial(TrialRecord(**trial_row(broken, **odd)))
    page = write_report(store.load(), tmp_path / "page.html")
    opened = open_page(page, 375, 800)
    opened.page.wait_for_timeout(200)
    assert opened.said == []
    assert opened.requests == [page.as_uri()]
    assert opened.page.locator("#all tbody script, #all tbody img").count() == 0
    opened.page.locator("summary:has(#cells)").click()
    assert HOSTILE[0] in opened.page.locator("#all").inner_text().replace("\u200b", "")
    assert opened.page.evaluate("() => document.documentElement.scrollWidth") <= 375
