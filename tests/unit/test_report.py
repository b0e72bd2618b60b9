"""The report as a whole: sections, a single file, and hostile text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.cli.report import report
from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.record.store import Results
from reports import write_report
from reports.run_sections import SECTIONS
from tests.commands import told
from tests.unit.html_page import (
    HOSTILE,
    Page,
    content_policy,
    loads_nothing,
    page_of,
    shows_as_text,
)
from tests.unit.made_results import MIB, diverged_rows, left_out, states, stored, trial_rows


def test_sections_come_in_order_and_only_with_data(
    page: Page, sharded_page: Page, tmp_path: Path
) -> None:
    order = [section.name for section in SECTIONS]
    few = page_of(stored(tmp_path, trial_rows(Cell(strategy="alone"), [1.0, 1.1])), tmp_path)
    for one in (page, sharded_page, few):
        assert one.headings == [name for name in order if name in one.headings]
    assert {"ranking", "scaling", "failures", "bubble"} <= set(page.headings)
    assert {"systems", "states", "traffic", "wrappers", "variants"} <= set(sharded_page.headings)
    assert few.headings == ["verdict", "parity", "cells", "environment", "method", "glossary"]


def test_nothing_is_loaded_from_anywhere(results: Results, tmp_path: Path) -> None:
    text = write_report(results, tmp_path / "page.html").read_text()
    loads_nothing(text)
    content_policy(text, "style", "script")


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_only_text(text: str, tmp_path: Path) -> None:
    odd: dict[str, Any] = dict.fromkeys(
        ("label", "cell_name", "workload", "parity_reason", "precision", "memory_method"), text
    )
    odd |= states((4, 0, 8, 4), (4, 0, 8, 4), trained_parameters=MIB)
    odd |= {"sent_bytes_per_step": [1.0, 2.0], "system": text, "wraps_ddp": text}
    odd |= {"library_buffers": json.dumps({text: 10**7}), "offload_kept_bytes": 1}
    near = {"stand_in": text, "parity_verdict": "within tolerance"}
    rows = trial_rows(Cell(strategy="a", devices=2), [3.0, 3.1], **odd, **near)
    rows += trial_rows(Cell(strategy="b", devices=2), [2.0, 2.1], **odd)
    rows += trial_rows(Cell(strategy="b", devices=1), [1.0, 1.1], **odd)
    rows += diverged_rows(Cell(strategy="c", devices=2), **odd, reason=text)
    failed = odd | {"log_tail": text, "stacks": text}
    rows += left_out(Cell(strategy="d", devices=2), "failed", text, **failed)
    rows += left_out(Cell(strategy="e", devices=2), "refused", text, **odd)
    of_run = ("host", "matrix", "cpu_model", "libraries", "plan", "git_commit")
    found = stored(tmp_path, rows, **dict.fromkeys(of_run, text))
    shows_as_text(text, write_report(found, tmp_path / "page.html").read_text())


def test_run_without_trials_has_a_report(tmp_path: Path) -> None:
    page = page_of(stored(tmp_path, []), tmp_path)
    assert "no recorded trial yet" in page.text
    assert page.headings == ["verdict", "environment", "method", "glossary"]


def test_mistakes_of_the_command_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path / "results", trial_rows(Cell(strategy="alone"), [1.0, 1.1]))
    monkeypatch.chdir(tmp_path)
    assert json.loads(told(report, "--json"))["report"].endswith(".html")
    several = ["a", "b", "--out", "x.html"]
    for wrong in (["nonsense"], ["--results", "nowhere"], ["--out", "."], several):
        with pytest.raises(UsageError):
            told(report, *wrong)
