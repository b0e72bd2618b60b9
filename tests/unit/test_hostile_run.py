"""Runs with every value unknown or NaN, in every format, page and tool."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from bench.cli.show import show
from harness.cell.cell import Cell
from harness.record.run_record import RunRecord
from harness.record.store import Store
from harness.record.table import Record
from harness.record.trial import TrialRecord
from reports import runs, site
from reports.cell_detail import in_full
from reports.export_records import as_csv, as_json
from reports.publish import LIBRARIES, publish
from reports.run_report import ran, reports_of
from reports.run_sections import run_page, run_text
from reports.runs import runs_page, runs_text
from tests.commands import told
from tests.unit.html_page import Page
from tests.unit.made_results import run_row, trial_rows
from tests.unit.recording import left_out_fields

OLD, NEW = "20260101T000000-aaaa", "20260102T000000-bbbb"
NAME = (
    '<script>alert("1")</script> \u202e\u05e9\u05dc\u05d5\u05dd '
    "\"><img src=x onerror=alert(1)>' {{ 7 * 191 }} [red]x[/red] \x1b[31m" + "n" * 500
)
CONTROLS = set("\x1b\u202e")
FULL, BARE, OTHER = (Cell(strategy=name, devices=2) for name in ("ddp", NAME, ""))


def without(table: type[Record], number: float | None) -> dict[str, Any]:
    """Returns null for all nullable columns, or `number` for those of floating-point numbers."""
    return {
        column.name: number if column.type == "double" else None
        for column in table.columns()
        if column.nullable
    }


@pytest.fixture(params=[None, math.nan], ids=["null", "nan"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Two runs with odd names: a complete cell, one that is ok but otherwise unknown, and a refused
    one."""
    found = Store(tmp_path / "results")
    for run_id in (OLD, NEW):
        names = {"run_id": run_id, "host": NAME, "matrix": NAME}
        found.write_run(RunRecord(**(run_row() | without(RunRecord, None) | names)))
        bare = left_out_fields(run_id, BARE, "ok", "") | without(TrialRecord, request.param)
        refused = left_out_fields(run_id, OTHER, "refused", NAME)
        for row in [*trial_rows(FULL, [10.0, 11.0]), bare, refused]:
            found.write_trial(TrialRecord(**(row | {"run_id": run_id})))
    return found


def harmless(page: Page) -> None:
    assert [tag for tag, _ in page.tags].count("script") <= 1
    assert not {"img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not [a for _, a in page.tags if any(name.startswith("on") for name in a)]
    assert not re.search(r"\b(nan|NaT|None|inf)\b", page.text)
    assert "1337" not in page.text
    assert not set(page.text) & CONTROLS


def test_pages_of_a_hostile_run_are_escaped(store: Store, tmp_path: Path) -> None:
    whole = store.load(steps=False)
    newest = ran(store.load([NEW], steps=False))
    compared = runs.compare_all(whole)
    for text in (
        run_page(newest).text,
        run_page(newest, printed=True).text,
        runs_page(compared).text,
        runs_page(compared, printed=True).text,
        site.page(site.entries(store, tmp_path), tmp_path),
    ):
        harmless(Page(text))
        assert "&lt;script&gt;alert(" in text.replace("<wbr>", "")


def test_text_and_data_of_a_hostile_run_are_escaped(store: Store) -> None:
    whole = store.load(steps=False)
    reports = reports_of(whole)
    for text in (run_text(reports[-1]).text, runs_text(runs.compare_all(whole)).text):
        assert "<script>" not in text
        assert "<img" not in text
        assert not set(text) & CONTROLS
        assert not re.search(r"\b(nan|NaT|None|inf)\b", text)
    document = json.loads(
        as_json(reports, **runs.as_json(runs.compare_all(whole))), parse_constant=pytest.fail
    )
    bare = next(cell for cell in document["cells"] if cell["cell_id"] == BARE.id)
    assert bare["label"] == NAME
    unknown = ("samples_per_second", "peak_memory_bytes", "parity_verdict", "state_bytes")
    assert {bare[name] for name in unknown} == {None}
    assert not bare["ranked"]
    lines = list(csv.DictReader(io.StringIO(as_csv(reports))))
    assert len(lines) == 6
    assert not {"nan", "None", "inf", "NaT"} & {value for line in lines for value in line.values()}


def test_one_cell_of_a_hostile_run_is_shown_escaped(store: Store) -> None:
    results = store.load([NEW], steps=False)
    for cell in (FULL, BARE, OTHER):
        detail = in_full(results, store.steps_of(NEW, cell.id), cell.id).as_json()
        assert json.loads(json.dumps(detail, allow_nan=False))["cell"]["cell_id"] == cell.id
        shown = told(show, cell.id, "--results", str(store.folder))
        assert not set(shown) & CONTROLS
        assert not re.search(r"\b(nan|None|inf)\b", shown)
        assert (cell is FULL) or "[red]" in shown


@pytest.mark.slow
@pytest.mark.parametrize("target", list(LIBRARIES))
def test_other_tools_get_a_hostile_run_escaped(store: Store, target: str, tmp_path: Path) -> None:
    done = publish(target, store.load([NEW]), tmp_path / "out")
    assert done.cells == 3
