"""The page of several runs and the index of all: numbers, marked changes, hostile text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from bench.cli.report import report
from harness.analysis.compare import compare_sides
from harness.analysis.selection import select
from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.record.run_record import RunRecord
from harness.record.store import Results, Store
from harness.record.trial import TrialRecord
from reports import runs, site
from reports.run_report import only
from reports.runs import SECTIONS, runs_page, runs_text
from tests import commands
from tests.unit.html_page import Page, loads_nothing
from tests.unit.made_results import MIB, left_out, run_row, trial_rows

DDP, FSDP, LATE = (Cell(strategy=name, devices=2) for name in ("ddp", "fsdp2", "tensor"))
DAYS = 14


def run_id(day: int) -> str:
    began = datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(days=day)
    return f"{began:%Y%m%dT%H%M%S}-d{day:03d}"


def add(store: Store, day: int, rows: Sequence[dict[str, Any]], **changes: Any) -> None:
    began = datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(days=day)
    store.write_run(RunRecord(**run_row(run_id=run_id(day), started_at=began, **changes)))
    for row in rows:
        store.write_trial(TrialRecord(**(row | {"run_id": run_id(day)})))


def trials(cell: Cell, speed: float, **changes: Any) -> list[dict[str, Any]]:
    return trial_rows(cell, [0.999 * speed, speed, 1.001 * speed], **changes)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two weeks of runs: halfway, ddp gets 10% slower and fsdp2 needs more memory; on the last
    day, tensor fails."""
    found = Store(tmp_path_factory.mktemp("nightly") / "results")
    for day in range(DAYS):
        rows = trials(DDP, 90.0 if day >= 7 else 100.0) + trials(
            FSDP, 50.0, peak_memory_bytes=(120 if day >= 7 else 100) * MIB
        )
        rows += (
            trials(LATE, 30.0) if day < DAYS - 1 else left_out(LATE, "failed", "rank 1: it broke")
        )
        add(found, day, rows)
    return found


@pytest.fixture(scope="module")
def results(store: Store) -> Results:
    return store.load(steps=False)


@pytest.fixture(scope="module")
def view(results: Results) -> runs.Runs:
    return runs.compare_all(results)


class Numbers(Page):
    """A page's numbers, with the attributes of their row and cell."""

    def __init__(self, text: str) -> None:
        self.numbers: list[tuple[dict[str, str | None], dict[str, str | None], str, float]] = []
        self._tr: dict[str, str | None] = {}
        self._td: dict[str, str | None] = {}
        super().__init__(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        found = dict(attrs)
        if tag == "tr":
            self._tr = found
        if tag in ("td", "th"):
            self._td = found
        if found.get("data-field"):
            self.numbers.append(
                (self._tr, self._td, str(found["data-field"]), float(found["data-value"] or "nan"))
            )


def test_every_number_of_the_page_is_that_of_the_comparison_and_of_the_history(
    results: Results, view: runs.Runs
) -> None:
    page = Numbers(runs_page(view).text)
    newest = select("newest", only(results, [run_id(DAYS - 1)]))
    ratios = newer = 0
    for row, td, field, value in page.numbers:
        if field == "ratio":
            other = select("other", only(results, [str(td["data-run"])]))
            (line,) = [
                x
                for x in compare_sides(other, newest).lines
                if x.second and x.second.cell_id == row["data-cell"]
            ]
            assert line.throughput is not None
            assert value == line.throughput.ratio
            ratios += 1
        elif field == "newest":
            column = (
                "samples_per_second" if row["data-figure"] == "throughput" else "peak_memory_bytes"
            )
            of_cell = results.trials[
                (results.trials["cell_id"] == row["data-cell"]) & (results.trials["status"] == "ok")
            ]
            newest = of_cell[of_cell["run_id"] == of_cell["run_id"].max()][column]
            mean = math.prod(newest) ** (1 / len(newest))
            expected = mean if column == "samples_per_second" else newest.median()
            assert value == pytest.approx(expected)
            newer += 1
    assert (ratios, newer) == (2 * runs.MOST_COLUMNS, 6)


def test_the_newest_is_compared_and_changes_are_marked(view: runs.Runs) -> None:
    page = Page(runs_page(view).text)
    present = [section.name for section in SECTIONS if section.name != "disturbed"]
    assert page.headings == present
    assert "1 regression: newly failing 1" in page.text
    for line in ("1 regression: newly failing 1", "▼ 10.0% slower since 2026-01-08"):
        assert line in runs_text(view).text
    assert re.search(r"ddp .{0,80}▼ 10\.0% slower since 2026-01-08", page.text)
    assert re.search(r"fsdp2 .{0,80}▲ 20\.0% more since 2026-01-08", page.text)
    charts = [tag for tag, _ in page.tags if tag == "svg"]
    assert len(charts) == 4, "throughput of three cells, memory of the one that changed"


def test_a_chart_has_the_levels_of_its_history(view: runs.Runs) -> None:
    (series,) = [one for one in view.throughput if one.cell_id == DDP.id]
    data = runs.trend(series, "x")
    assert data.values == pytest.approx((100.0,) * 7 + (90.0,) * 7)
    levels = [value for level in data.levels for value in level]
    assert levels == pytest.approx([0, 6, 100.0, 7, 13, 90.0])
    assert data.changes == ((7, "▼ 10.0% slower"),)
    (axes,) = data.draw().axes
    assert [
        round(line.get_xdata()[0], 1) for line in axes.lines if line.get_linestyle() == "--"
    ] == [6.5]
    (memory,) = [one for one in view.memory if one.cell_id == FSDP.id]
    assert runs.trend(memory, "y").values[-1] == 120.0


def test_nothing_is_loaded_and_only_the_own_script_runs(
    view: runs.Runs, store: Store, tmp_path: Path
) -> None:
    loads_nothing(runs_page(view).text)
    loads_nothing(site.page(site.entries(store, tmp_path), tmp_path))


def test_matrices_that_differ_are_compared_where_they_meet(tmp_path: Path) -> None:
    store = Store(tmp_path)
    add(store, 0, trials(DDP, 100.0) + trials(FSDP, 50.0))
    add(store, 1, trials(DDP, 80.0), matrix="quick")
    found = runs.compare_all(store.load(steps=False))
    (other,) = found.columns
    assert other.against is not None
    assert other.against.headline == "1 regression: slower 1"
    assert other.why_not == "of another matrix: 1 cell in only one of the two"


def test_runs_without_anything_in_common_say_so(tmp_path: Path) -> None:
    store = Store(tmp_path)
    add(store, 0, trials(DDP, 100.0))
    add(store, 1, trials(FSDP, 80.0))
    page = Page(runs_page(runs.compare_all(store.load(steps=False))).text)
    assert "have no cell in common" in page.text
    assert page.headings == ["verdict", "changes", "method"]


def test_searches_are_not_compared(tmp_path: Path) -> None:
    store = Store(tmp_path)
    add(store, 0, trials(DDP, 100.0))
    add(store, 1, trials(DDP, 1.0), plan=json.dumps({"cells": [], "search": {"budget": 1}}))
    with pytest.raises(UsageError, match="two runs"):
        runs.compare_all(store.load(steps=False))


def ask(*words: str) -> str:
    return commands.told(report, *words)


@pytest.mark.slow
def test_the_command_writes_several_runs_and_the_index(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = ("--results", str(store.folder))
    one = f"reports/html/{run_id(0)}-to-{run_id(DAYS - 1)}.html"
    assert ask("--all", *folder).strip() == one
    assert ask("latest", run_id(0), *folder).strip() == one, "their order does not matter"
    found = json.loads(ask("latest~1", "latest", "--format", "json", *folder))
    assert {cell["run_id"] for cell in found["cells"]} == {run_id(DAYS - 2), run_id(DAYS - 1)}
    assert (found["comparisons"][0]["regressions"], len(found["history"])) == (1, 6)
    pages = [f"reports/html/{run_id(day)}.html" for day in (DAYS - 2, DAYS - 1)]
    assert ask("latest~1", "latest", "--each", *folder).split() == pages
    assert ask("--index", *folder).strip() == "reports/html/index.html"
    page = Numbers(Path("reports/html/index.html").read_text())
    links = [str(a["href"]) for tag, a in page.tags if tag == "a" and a.get("class") == "name"]
    files = [*dict.fromkeys(link for link in links if "#" not in link)]
    newest_first = [Path(page).name for page in (*reversed(pages), one)]
    assert files == newest_first, "pages of several runs come last"
    assert all((Path("reports/html") / link.partition("#")[0]).is_file() for link in links)
    failures = [
        (row["data-run"], value) for row, _, field, value in page.numbers if field == "failures"
    ]
    assert failures == [(run_id(day), float(day == DAYS - 1)) for day in reversed(range(DAYS))]
    with pytest.raises(UsageError, match="--out"):
        ask("latest~1", "latest", "--each", "--out", "x.html", *folder)


def test_the_run_before_is_of_the_same_matrix_and_hardware(tmp_path: Path) -> None:
    store = Store(tmp_path)
    add(store, 0, trials(DDP, 100.0))
    add(store, 1, trials(DDP, 10.0), cpu_cores=64)
    add(store, 2, trials(DDP, 10.0), matrix="quick")
    add(store, 3, trials(DDP, 80.0))
    found = site.entries(store, tmp_path)
    assert [one.before for one in found] == [run_id(0), "", "", ""]
    change = found[0].change
    assert change is not None
    assert (change.headline, len(change.regressions)) == ("1 regression: slower 1", 1)
