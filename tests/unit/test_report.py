"""The report as a whole: sections, a single file, and hostile text."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bench.cli.report import report
from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.record.store import Results
from harness.record.trial import TrialRecord
from harness.seam.registry import strategies
from reports import write_report
from tests.unit.html_page import HOSTILE, Page, content_policy, page_of
from tests.unit.made_results import MIB, diverged_rows, left_out, states, stored, trial_rows


def test_sections_come_in_order_and_only_with_data(page: Page, tmp_path: Path) -> None:
    first = ["verdict", "ranking", "scaling", "failures", "memory", "front", "parity", "bubble"]
    assert page.headings == [*first, "cells", "environment", "method", "glossary"]
    few = page_of(stored(tmp_path, trial_rows(Cell(strategy="alone"), [1.0, 1.1])), tmp_path)
    assert few.headings == ["verdict", "parity", "cells", "environment", "method", "glossary"]


def test_nothing_is_loaded_from_anywhere(results: Results, tmp_path: Path) -> None:
    text = write_report(results, tmp_path / "page.html").read_text()
    page = Page(text)
    assert not re.search(r"https?://|url\((?!#)|@import", text)
    for _, attributes in page.tags:
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        assert all(str(attributes.get(name) or "#").startswith("#") for name in ("href", "src"))
    policy = content_policy(text, "style", "script")
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_only_text(text: str, tmp_path: Path) -> None:
    odd: dict[str, Any] = dict.fromkeys(
        ("label", "cell_name", "workload", "parity_reason", "precision", "memory_method"), text
    )
    odd |= states((4, 0, 8, 4), (4, 0, 8, 4), trained_parameters=MIB) | {
        "sent_bytes_per_step": [1.0, 2.0],
        "system": text,
    }
    odd |= {
        "wraps_ddp": text,
        "library_buffers": json.dumps({text: 10**7}),
        "offload_kept_bytes": 1,
    }
    rows = trial_rows(
        Cell(strategy="a", devices=2),
        [3.0, 3.1],
        **odd,
        stand_in=text,
        parity_verdict="within tolerance",
    )
    rows += trial_rows(Cell(strategy="b", devices=2), [2.0, 2.1], **odd)
    rows += trial_rows(Cell(strategy="b", devices=1), [1.0, 1.1], **odd)
    rows += diverged_rows(Cell(strategy="c", devices=2), **odd, reason=text)
    rows += left_out(
        Cell(strategy="d", devices=2), "failed", text, **odd, log_tail=text, stacks=text
    )
    rows += left_out(Cell(strategy="e", devices=2), "refused", text, **odd)
    found = stored(
        tmp_path,
        rows,
        host=text,
        matrix=text,
        cpu_model=text,
        libraries=text,
        plan=text,
        git_commit=text,
    )
    page = page_of(found, tmp_path)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not [tag for tag, _ in page.tags if tag in ("img", "iframe", "object")]
    assert not [a for _, a in page.tags if any(name.startswith("on") for name in a)]
    assert "1337" not in page.text
    if text.isprintable():
        assert " ".join(text.split())[:200] in page.text
    assert not set(page.text) & set("\x00\x08\x1b\u202e")


def test_run_without_trials_has_a_report(tmp_path: Path) -> None:
    page = page_of(stored(tmp_path, []), tmp_path)
    assert "no recorded trial yet" in page.text
    assert page.headings == ["verdict", "environment", "method", "glossary"]


def test_report_is_of_one_run(tmp_path: Path, results: Results) -> None:
    empty = Results(results.runs.iloc[:0], results.trials.iloc[:0], results.steps.iloc[:0])
    with pytest.raises(ValueError, match="one run, not of 0"):
        write_report(empty, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_no_strategy_is_named_in_the_code() -> None:
    # A column and a strategy have the same name.
    names = set(strategies()) - {column.name for column in TrialRecord.columns()}
    for path in sorted((Path(__file__).parents[2] / "reports").rglob("*.py")):
        constants = [
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant)
        ]
        texts = {value for value in constants if isinstance(value, str)}
        assert not texts & names, path


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()
    app.command()(report)
    stored(tmp_path / "results", trial_rows(Cell(strategy="alone"), [1.0, 1.1]))
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["--json"], catch_exceptions=False)
    assert json.loads(shown.stdout)["report"] == "reports/html/20260101T000000-abcd.html"
    assert (tmp_path / "reports/html/20260101T000000-abcd.html").is_file()
    CliRunner().invoke(app, ["20260101T000000-abcd", "--out", "page.html"], catch_exceptions=False)
    assert (tmp_path / "page.html").is_file()
    for wrong in (
        ["nonsense"],
        ["--results", "nowhere"],
        ["--out", "."],
        ["a", "b", "--out", "x.html"],
    ):
        with pytest.raises(UsageError):
            CliRunner().invoke(app, wrong, catch_exceptions=False)
