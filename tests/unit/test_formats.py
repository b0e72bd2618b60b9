"""Formats of one run's report: equal numbers, chosen sections, and the page for print."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from bench.cli.report import Format, report
from harness.analysis.summary import cells as summarise
from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.record.files import TABLES
from harness.record.run_record import RunRecord
from harness.record.store import Results, Store
from reports.export_records import FIGURES, IDENTITY, LISTS, as_csv, as_json
from reports.run_report import RunReport, ran
from reports.run_sections import SECTIONS, run_page, run_text
from tests import commands
from tests.unit.html_page import HOSTILE, Page, content_policy
from tests.unit.made_results import (
    MIB,
    diverged_rows,
    left_out,
    run_row,
    searched,
    states,
    stored,
    trial_rows,
    typical,
)

RUN_ID = "20260101T000000-abcd"
ON_PAGE = [section.name for section in SECTIONS]
IN_TEXT = [section.name for section in SECTIONS if section.in_text]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return stored(tmp_path_factory.mktemp("formats") / "results", typical())


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
    assert (fast["label"], fast["place"], fast["same_as_above"], fast["ranked"]) == (
        "fast",
        1,
        False,
        True,
    )
    assert (near["place"], near["same_as_above"]) == (2, True)
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


def test_columns_keep_their_schema_names() -> None:
    """Columns taken from the schema keep their names, and no name occurs twice."""
    schema = {c.name for table in ("runs", "trials") for c in TABLES[table].columns()}
    own = {
        "ranked",
        "place",
        "same_as_above",
        "trials",
        "disturbed_trials",
        "baseline",
        "over_baseline",
        "efficiency_own",
        "efficiency_single",
        "peak_flops_per_second",
        "matmul_flops_per_second",
        "peak_memory_bytes_low",
    }
    own |= {
        f"{name}_{end}"
        for name in ("samples_per_second", "tokens_per_second", "over_baseline")
        for end in ("low", "high")
    }
    own |= {"state_bytes", "formula_bytes", "formula_deviation"}
    assert {*IDENTITY, *FIGURES} - own <= schema
    assert len({*IDENTITY, *FIGURES}) == len(IDENTITY) + len(FIGURES)


def test_markdown_has_verdict_ranking_and_failures(one: RunReport) -> None:
    written = run_text(one)
    text = written.text
    assert written.absent == []
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")][:2] == [
        "Verdict",
        "Throughput and memory",
    ]
    assert re.search(r"\| fast \| Use \| 4,544 ", text)
    assert ": near" in text
    assert re.search(r"\| 2 ≈ 1 \| near \|", text)
    assert re.search(r"\| 4 \| once† \| 1,280 \| [\d,]+ to [\d,]+ \|", text)
    assert "† a stand-in ran instead" in text
    for words in (
        "**failed** broken",
        "rank 1: it broke; mend it",
        "**trained something else, as expected** known",
        "pip install absent",
    ):
        assert words in text, words
    assert not {"nan", "None", "inf"} & set(re.split(r"[^A-Za-z]+", text))


def test_markdown_of_a_search_and_of_nothing(tmp_path: Path) -> None:
    text = run_text(ran(searched(tmp_path / "search"))).text
    assert "the largest model that trains here has **30 parameters**, under **less**" in text
    empty = run_text(ran(stored(tmp_path / "empty", []))).text
    assert "no recorded trial" in empty


def test_sections_of_markdown(one: RunReport) -> None:
    written = run_text(one, ["failures", "verdict"])
    assert [line for line in written.text.splitlines() if line.startswith("## ")] == [
        "## Verdict",
        "## What failed, diverged or did not run",
    ]
    assert written.absent == []


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        *HOSTILE,
        "",
        "=1+1",
        "`code` *bold* [link](javascript:alert(1)) | pipe\n# heading",
        "@everyone",
    ],
)
def test_hostile_text_is_only_text_in_every_format(text: str, tmp_path: Path) -> None:
    a, b, c, d = (
        Cell(strategy=text, workload=text, system=text, devices=2, seed=seed) for seed in range(4)
    )
    odd: dict[str, Any] = dict.fromkeys(("parity_reason", "memory_method"), text)
    odd |= states((4, 0, 8, 4), (4, 0, 8, 4), trained_parameters=MIB) | {
        "sent_bytes_per_step": [1.0, math.nan],
    }
    rows = trial_rows(
        a,
        [3.0, 3.1],
        **odd,
        stand_in=text,
        parity_verdict="within tolerance",
    )
    rows += trial_rows(b, [2.0, 2.1], **odd, peak_memory_bytes=None, mfu=math.nan)
    rows += diverged_rows(c, **odd, reason=text)
    rows += left_out(d, "failed", text, **odd, log_tail=text, stacks=text)
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
    one = ran(found)
    (record,) = [
        cell
        for cell in json.loads(as_json([one]), parse_constant=pytest.fail)["cells"]
        if cell["status"] == "failed"
    ]
    assert (record["label"], record["reason"]) == (text, text), "JSON keeps text unchanged"
    lines = list(csv.DictReader(io.StringIO(as_csv([one]))))
    assert {line["label"] for line in lines} == {
        f"'{text}" if text.startswith(("=", "@")) else text
    }
    assert not [value for line in lines for value in line.values() if value[:1] in tuple("=+@")]
    assert not {"nan", "None", "inf"} & {value for line in lines for value in line.values()}
    told = run_text(one).text
    assert "<script>" not in told
    assert "<img" not in told
    assert "\u202e" not in told
    assert not re.search(r"(?<!\\)\]\(", told)
    assert "@everyone" not in told
    assert not re.search(r"^#+ heading$", told, re.MULTILINE)
    tables = [line for line in told.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in tables} <= {
        4,
        5,
        6,
        7,
        8,
    }, "a pipe does not start a column"
    for page in (run_page(one, printed=True), run_page(one, ["verdict"])):
        tags = [tag for tag, _ in Page(page.text).tags]
        assert not {"img", "iframe", "object"} & set(tags)
        assert tags.count("script") <= 1


def test_the_document_names_every_format() -> None:
    document = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    assert set(re.findall(r"^\| `([a-z-]+)` \|", document, re.MULTILINE)) == {
        *get_args(Format),
        "--format",
    }


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
        (
            ["--section", "verdit"],
            f"'verdit'.* {', '.join(ON_PAGE[:2])}",
        ),
        (
            ["--section", "cells", "--format", "md"],
            f"'cells'.* {', '.join(IN_TEXT)}",
        ),
        (["--section", "verdict", "--format", "csv"], "leave --section out"),
        (["--format", "md", "--json"], "name a file with --out"),
        (["--format", "csv", "--open"], "--open shows a file"),
        (["--index", "--all"], "--index writes only the index"),
        (["--all", RUN_ID], "--all"),
        (["nonsense"], "no run 'nonsense'"),
        (["--section", "parts", "--format", "md"], "section"),
        (["--baseline-cell", "nonsense"], "'nonsense' is not a cell"),
        (["--section", "largest"], "no data for it"),
        (["--all"], "a comparison needs two runs"),
    ],
)
def test_command_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    stored(tmp_path / "results", typical()[:3])
    monkeypatch.chdir(tmp_path)
    if words == ["--all"]:
        Store(tmp_path / "results").write_run(RunRecord(**run_row(run_id="20260102T000000-bbbb")))
    with pytest.raises(UsageError, match=said):
        ask(*words)
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
