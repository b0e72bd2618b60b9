"""Formats of one run's report: equal numbers, chosen sections, and the page for print."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from bench.cli.report import report
from harness.analysis.summary import cells as summarise
from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.record.store import Results
from reports.export_records import FIGURES, IDENTITY, LISTS, as_csv, as_json
from reports.run_report import RunReport, ran
from reports.run_sections import SECTIONS, run_page, run_text
from tests import commands
from tests.unit.html_page import Page, content_policy
from tests.unit.made_results import (
    left_out,
    searched,
    stored,
    trial_rows,
    typical,
)

RUN_ID = "20260101T000000-abcd"
ON_PAGE = [section.name for section in SECTIONS]
IN_TEXT = [section.name for section in SECTIONS if section.in_text]


@pytest.fixture(scope="module")
def one(results: Results) -> RunReport:
    return ran(results)


@pytest.fixture(scope="module")
def html(results: Results) -> str:
    return run_page(ran(results)).text


def same(value: Any, expected: Any) -> bool:
    """Returns whether a machine format's value equals the frame's; null stands for NaN."""
    unknown = expected is None or (isinstance(expected, float) and not math.isfinite(expected))
    return value is None if unknown else value == expected


def test_json_has_the_frames_own_numbers(results: Results, one: RunReport) -> None:
    told = json.loads(as_json([one]), parse_constant=pytest.fail)
    frame = summarise(results.trials).set_index("cell_id")
    assert [run["run_id"] for run in told["runs"]] == [RUN_ID]
    assert {cell["cell_id"] for cell in told["cells"]} == set(frame.index)
    compared = 0
    for cell in told["cells"]:
        row = frame.loc[cell["cell_id"]]
        for name, value in cell.items():
            if name in frame.columns and name not in (*LISTS, "by_round"):
                assert same(value, row[name]), (cell["cell_name"], name, value, row[name])
                compared += value is not None
        assert cell["samples_per_second_by_trial"] == {
            str(trial): speed for trial, speed in row["by_round"].items()
        }
    assert compared > 300
    fast, near = (
        next(c for c in told["cells"] if (c["label"], c["devices"]) == (label, 2))
        for label in ("fast", "near")
    )
    assert (fast["place"], fast["may_be_fastest"], fast["ranked"]) == (1, True, True)
    assert (near["place"], near["may_be_fastest"]) == (2, True)
    assert isinstance(fast["peak_memory_bytes"], int)


def test_csv_has_the_same_records(one: RunReport) -> None:
    told = json.loads(as_json([one]))["cells"]
    lines = list(csv.DictReader(io.StringIO(as_csv([one]))))
    assert len(lines) == len(told)
    for line, record in zip(lines, told, strict=True):
        assert list(line) == [*IDENTITY, *FIGURES]
        for name, text in line.items():
            value = record[name]
            if value is None:
                assert text == ""
            elif isinstance(value, bool):
                assert text == str(value).lower()
            elif isinstance(value, float):
                assert float(text) == value
            else:
                assert text == str(value)


def test_markdown_has_verdict_ranking_and_failures(one: RunReport) -> None:
    written = run_text(one)
    text = written.text
    assert written.absent == []
    assert re.search(r"\| fast \| Use \| 4,544 ", text)
    assert re.search(r"\| 2 \| near \| ● \|", text)
    assert re.search(r"\| — \| once† \| — \| 1,280 \| [\d,]+ to [\d,]+ \|", text)
    for reason in ("**failed** broken", "rank 1: it broke; mend it", "pip install absent"):
        assert reason in text
    assert not {"nan", "None", "inf"} & set(re.split(r"[^A-Za-z]+", text))
    few = run_text(one, ["failures", "verdict"])
    assert (few.text.count("\n## "), few.absent) == (2, [])


def test_markdown_of_a_search_and_of_nothing(tmp_path: Path) -> None:
    text = run_text(ran(searched(tmp_path / "search"))).text
    assert "the largest model that trains here has **30 parameters**, under **less**" in text
    empty = run_text(ran(stored(tmp_path / "empty", []))).text
    assert "no recorded trial" in empty


def test_sections_of_the_page(one: RunReport, html: str) -> None:
    page = run_page(one, ["cells", "verdict", "parts"])
    assert page.absent == ["parts"]
    shown = Page(page.text)
    assert shown.headings == ["verdict", "cells"]
    assert {f"cell-{Cell(strategy='fast', devices=2).id}"} <= set(shown.rows)
    whole = Page(html)
    assert whole.headings == [name for name in ON_PAGE if name in whole.headings]
    cut = Page(run_page(one, ["parity"]).text)
    assert cut.headings == ["parity"]
    ids = {a["id"] for _, a in cut.tags if a.get("id")}
    assert all(str(a["href"])[1:] in ids for tag, a in cut.tags if tag == "a" and a.get("href")), (
        "every link has a target"
    )
    with pytest.raises(UsageError, match="no data for it; it has verdict"):
        run_page(one, ["parts"])


def test_the_page_for_print_is_light_open_and_without_script(one: RunReport, html: str) -> None:
    text = run_page(one, printed=True).text
    page = Page(text)
    tags = [tag for tag, _ in page.tags]
    assert "details" in tags
    assert "script" not in tags
    assert all("open" in a for tag, a in page.tags if tag == "details")
    assert "script-src 'none'" in content_policy(text, "style")
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert "@media print" not in style
    assert "prefers-color-scheme: dark" not in style
    assert "@page" in style
    assert ("meta", {"name": "color-scheme", "content": "light"}) in page.tags
    assert (
        page.text.split("Which parallelism")[1] == Page(html).text.split("Which parallelism")[1]
    ), "both pages have the same words"


@pytest.mark.parametrize("text", ["", "=1+1", "@everyone", "<img> `a` [b](c:d) | e\n# heading"])
def test_formulas_mentions_and_markup_are_only_text(text: str, tmp_path: Path) -> None:
    a, b = (Cell(strategy=text, workload=text, system=text, devices=n) for n in (1, 2))
    odd = {"parity_reason": text, "parity_verdict": "within tolerance", "stand_in": text}
    rows = trial_rows(a, [3.0, 3.1], **odd, peak_memory_bytes=None, mfu=math.nan)
    rows += left_out(b, "failed", text, log_tail=text, stacks=text)
    one = ran(stored(tmp_path, rows, host=text, matrix=text, libraries=text, plan=text))
    told = json.loads(as_json([one]), parse_constant=pytest.fail)["cells"]
    (record,) = [cell for cell in told if cell["status"] == "failed"]
    assert (record["label"], record["reason"]) == (text, text), "JSON keeps text unchanged"
    lines = list(csv.DictReader(io.StringIO(as_csv([one]))))
    assert {line["label"] for line in lines} == {f"'{text}" if text[:1] in [*"=@"] else text}
    values = {value for line in lines for value in line.values()}
    assert not [value for value in values if value[:1] in [*"=+@"]], "a formula of a spreadsheet"
    assert not {"nan", "None", "inf"} & values
    shown = run_text(one).text
    assert not re.search(r"<script>|<img|\u202e|(?<!\\)\]\(|@everyone|^#+ heading$", shown, re.M)
    table = [line for line in shown.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} <= {4, 5, 6, 7, 8}


def ask(*words: str) -> tuple[int, str]:
    return commands.ask(report, *words)


@pytest.mark.slow
def test_command_writes_each_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path / "results", typical())
    monkeypatch.chdir(tmp_path)
    assert ask("latest", "--format", "csv")[1].startswith("run_id,cell_id,")
    assert json.loads(ask("--format", "json")[1])["runs"][0]["run_id"] == RUN_ID
    assert ask("--format", "md", "--section", "failures")[1].count("\n## ") == 1
    assert ask("--out", "found.csv")[1] == "found.csv\n"
    assert Path("found.csv").read_text().startswith("run_id,cell_id,")
    assert ask("--format", "pdf-ready")[1] == f"reports/html/{RUN_ID}.print.html\n"
    assert ask("--section", "verdict", "--out", "some.html")[1] == "some.html\n"
    assert Page(Path("some.html").read_text()).headings == ["verdict"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--section verdit", f"'verdit'.* {', '.join(ON_PAGE[:2])}"),
        ("--section cells --format md", f"'cells'.* {', '.join(IN_TEXT)}"),
        ("--section verdict --format csv", "leave --section out"),
        ("--format md --json", "name a file with --out"),
        ("--format csv --open", "--open shows a file"),
        ("--index --all", "--index writes only the index"),
        (f"--all {RUN_ID}", "--all"),
        ("--baseline nonsense", "'nonsense' is not a cell"),
        ("--section largest", "no data for it"),
    ],
)
def test_command_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    stored(tmp_path / "results", typical()[:3])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=said):
        ask(*words.split())
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
