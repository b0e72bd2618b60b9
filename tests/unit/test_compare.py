"""Comparing runs: by hand on synthetic frames, without processes."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from bench.cli.compare import compare
from harness.analysis.compare import compare_cells, compare_sides
from harness.analysis.compared_cell import REGRESSIONS, ComparedCell
from harness.analysis.run_comparison import RunComparison
from harness.analysis.selection import find_run, measured, select, two_sides
from harness.analysis.stats import COMPARISON_METHOD
from harness.record.run import RunRecord
from harness.record.store import Results, Store
from harness.record.trial import TrialRecord
from harness.spec.cell import Cell
from harness.spec.errors import UsageError
from reports.comparison import markdown, page
from tests import commands
from tests.unit.test_report import HOSTILE, MIB, diverged_rows, left_out, run_row, trial_rows

CELL = Cell(strategy="ddp", devices=2)
OTHER = Cell(strategy="fsdp2", devices=2)
OLD, NEW = "20260101T000000-aaaa", "20260102T000000-bbbb"


def frames(rows: Sequence[dict[str, Any]], run_id: str = OLD, **changes: Any) -> Results:
    """The frames of one run, as the store gives them."""
    run = run_row(run_id=run_id, started_at=datetime(2026, 1, 1, tzinfo=timezone.utc), **changes)
    tables = []
    trials = [row | {"run_id": run_id} for row in rows]
    for table, found in ((RunRecord, [run]), (TrialRecord, trials)):
        names = [column.name for column in table.columns()]
        tables.append(
            pd.DataFrame([{name: row.get(name) for name in names} for row in found], columns=names)
        )
    return Results(*tables, pd.DataFrame())


def together(*results: Results) -> Results:
    runs, trials = (
        pd.concat([getattr(one, name) for one in results], ignore_index=True)
        for name in ("runs", "trials")
    )
    return Results(runs, trials, pd.DataFrame())


def compared(
    was: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]], **changes: Any
) -> RunComparison:
    """B (with changes to its run's row) against A."""
    return compare_sides(select("old", frames(was)), select("new", frames(now, NEW, **changes)))


def only(
    was: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]], **changes: Any
) -> ComparedCell:
    (line,) = compared(was, now, **changes).lines
    return line


def test_the_ratio_is_b_over_a() -> None:
    """Geometric means of 100 and of 50: a ratio of a half; the other way round 2."""
    fast, slow = (
        trial_rows(CELL, [99.0, 100.0, 10000 / 99]),
        trial_rows(CELL, [50.0, 50.1, 2500 / 50.1]),
    )
    line = only(fast, slow)
    assert line.kind == "slower"
    assert line.regression
    assert line.throughput is not None
    assert line.throughput.ratio == pytest.approx(0.5)
    assert (line.throughput.low or 1) < 0.5 < (line.throughput.high or 0) < 1
    back = only(slow, fast)
    assert (back.kind, back.regression) == ("faster", False)
    assert back.throughput is not None
    assert back.throughput.ratio == pytest.approx(2.0)


speeds = some.lists(some.floats(1, 1e4), min_size=2, max_size=5)


@settings(max_examples=20, deadline=None)
@given(one=speeds, two=speeds)
def test_there_and_back_are_each_others_inverse(one: list[float], two: list[float]) -> None:
    there, back = (
        only(trial_rows(CELL, one), trial_rows(CELL, two)),
        only(trial_rows(CELL, two), trial_rows(CELL, one)),
    )
    assert there.throughput is not None
    assert back.throughput is not None
    assert there.throughput.ratio * back.throughput.ratio == pytest.approx(1)
    assert {there.kind, back.kind} in ({"slower", "faster"}, {"no difference seen"})
    assert only(trial_rows(CELL, one), trial_rows(CELL, one)).kind == "no difference seen"


def test_one_trial_says_nothing() -> None:
    line = only(trial_rows(CELL, [100.0]), trial_rows(CELL, [50.0]))
    assert line.kind == "no difference seen"
    assert "one trial: no interval" in line.verdict


def state(name: str) -> list[dict[str, Any]]:
    """Trials of a cell in this state."""
    good = trial_rows(CELL, [50.0, 51.0])
    if name == "ok":
        return good
    if name == "unverified":
        return trial_rows(
            CELL, [50.0, 51.0], parity_verdict="unknown", parity_reason="no reference"
        )
    if name == "diverged":
        return diverged_rows(CELL)
    if name in ("refused", "unavailable", "interrupted"):
        return left_out(CELL, name, "the reason")
    return [good[0], left_out(CELL, name, "the reason")[0] | {"trial": 1}] if name else []


@pytest.mark.parametrize(
    ("was", "now", "kind"),
    [
        ("ok", "", "missing"),
        ("ok", "failed", "newly failing"),
        ("ok", "timeout", "newly failing"),
        ("ok", "out_of_memory", "newly failing"),
        ("ok", "interrupted", "newly failing"),
        ("ok", "diverged", "newly diverged"),
        ("ok", "unavailable", "newly unavailable"),
        ("ok", "refused", "newly unavailable"),
        ("ok", "unverified", "no longer verified"),
        ("unverified", "failed", "newly failing"),
        ("unavailable", "failed", "newly failing"),
        ("failed", "diverged", "newly diverged"),
        ("failed", "unavailable", "newly unavailable"),
        ("", "ok", "added"),
        ("", "failed", "added"),
        ("failed", "ok", "mended"),
        ("diverged", "ok", "mended"),
        ("unavailable", "ok", "mended"),
        ("failed", "failed", "not compared"),
        ("failed", "timeout", "not compared"),
        ("refused", "unavailable", "not compared"),
        ("unverified", "unverified", "not compared"),
        ("diverged", "unverified", "not compared"),
        ("failed", "", "not compared"),
    ],
)
def test_what_became_of_a_cell(was: str, now: str, kind: str) -> None:
    both = trial_rows(OTHER, [10.0, 10.1])
    found = compared([*state(was), *both], [*state(now), *both])
    (line,) = [line for line in found.lines if line.cell_name == CELL.name]
    assert line.kind == kind
    assert line.regression == (kind in REGRESSIONS)
    assert line.throughput is None
    assert line.reason, "a finding has its reason"
    if now == "failed" and was != "":
        assert "1 of 2 trials: the reason" in line.reason


def test_findings_come_first_and_the_headline_counts_them() -> None:
    cells = [Cell(strategy=name) for name in ("a", "b", "c", "d")]
    was = [row for cell in cells[:3] for row in trial_rows(cell, [10.0, 10.0])]
    now = (
        trial_rows(cells[0], [10.0, 10.0])
        + trial_rows(cells[1], [9.0, 9.0])
        + trial_rows(cells[3], [1.0, 1.0])
    )
    found = compared(was, now)
    assert [line.kind for line in found.lines] == [
        "slower",
        "missing",
        "added",
        "no difference seen",
    ]
    assert (
        found.headline
        == "2 regressions: slower 1, missing 1. Besides: added 1, no difference seen 1"
    )
    assert (found.comparisons, len(found.regressions)) == (
        4,
        2,
    ), "throughput and memory of two cells"
    assert "4 were made here, so up to 0.02 are" in found.method["False alarms"]


@pytest.mark.parametrize(
    ("changes", "device", "said"),
    [
        ({}, "cpu", ""),
        ({"host": "another"}, "cpu", ""),
        ({"memory_bytes": 8 * 2**30 - 2**26}, "cpu", ""),
        ({"gpus": ["A GPU"], "gpu_memory_bytes": 2**34}, "cpu", ""),
        ({"cpu_model": "Other CPU"}, "cpu", "other CPU: Example CPU, then Other CPU"),
        ({"cpu_model": None}, "cpu", "other CPU: Example CPU, then unknown"),
        ({"cpu_cores": 4}, "cpu", "other number of CPU cores: 2, then 4"),
        ({"memory_bytes": 2**32}, "cpu", "other memory: 8.0 GiB, then 4.0 GiB"),
        (
            {"gpus": ["A GPU", "A GPU"], "gpu_memory_bytes": 2**34},
            "cuda",
            "other GPUs: none, then 2 x A GPU",
        ),
    ],
)
def test_only_equal_hardware_is_compared(changes: dict[str, Any], device: str, said: str) -> None:
    rows = trial_rows(CELL.model_copy(update={"device": device}), [10.0, 10.1])
    line = only(rows, rows, **changes)
    assert line.kind == ("not compared" if said else "no difference seen")
    assert line.reason == said
    assert not line.regression


def test_gpus_of_another_size_are_other_hardware() -> None:
    rows = trial_rows(CELL.model_copy(update={"device": "cuda"}), [10.0, 10.1])
    one, two = (
        frames(rows, run, gpus=["A GPU"], gpu_memory_bytes=size)
        for run, size in ((OLD, 2**34), (NEW, 2**35))
    )
    (line,) = compare_sides(select("old", one), select("new", two)).lines
    assert line.reason == "other GPU memory: 16.0 GiB, then 32.0 GiB"


@pytest.mark.parametrize(
    ("host", "kind"), [("bench-host", "no difference seen"), ("another", "not compared")]
)
def test_unknown_processors_are_equal_on_one_host_only(host: str, kind: str) -> None:
    rows = trial_rows(CELL, [10.0, 10.1])
    was, now = (
        select("old", frames(rows, cpu_model=None)),
        select("new", frames(rows, NEW, cpu_model=None, host=host)),
    )
    assert compare_sides(was, now).lines[0].kind == kind


def test_other_software_is_compared_and_said() -> None:
    rows = trial_rows(CELL, [10.0, 10.1])
    found = compared(
        rows,
        rows,
        torch_version="2.14.0",
        libraries=json.dumps({"numpy": "2.4.6", "peft": "0.21"}),
        git_commit=None,
    )
    assert found.differences == (
        "torch 2.13.0 → 2.14.0",
        "commit of the suite 0123abc → unknown",
        "peft none → 0.21",
    )
    assert found.lines[0].kind == "no difference seen"


@pytest.mark.parametrize(
    ("was", "now", "verdict"),
    [
        ([100, 100.1, 100.2], [106, 106.1, 106.2], "more memory"),
        ([106, 106.1, 106.2], [100, 100.1, 100.2], "less memory"),
        ([100, 100, 100], [106, 106, 106], "more memory"),
        ([100, 100.1, 100.2], [104, 104.1, 104.2], "no difference seen"),
        ([100, 110, 120], [115, 125, 135], "no difference seen"),
        ([100], [200], "no difference seen"),
    ],
)
def test_memory_has_a_threshold_of_its_own(
    was: list[float], now: list[float], verdict: str
) -> None:
    sides = [
        [
            row | {"peak_memory_bytes": int(peak * MIB)}
            for row, peak in zip(trial_rows(CELL, [10.0] * len(peaks)), peaks, strict=True)
        ]
        for peaks in (was, now)
    ]
    line = only(*sides)
    assert line.memory_verdict == verdict
    assert line.memory is not None
    assert line.memory.ratio == pytest.approx(now[0] / was[0], rel=0.02)
    assert verdict in line.verdict
    assert line.regression == (verdict == "more memory")
    other = [row | {"memory_method": "another"} for row in sides[1]]
    assert only(sides[0], other).memory is None


def test_only_the_last_attempt_counts() -> None:
    now = trial_rows(CELL, [10.0, 10.1])
    again = [left_out(CELL, "interrupted", "stopped")[0] | {"attempt": 1}] + [
        row | {"attempt": 2} for row in now
    ]
    assert only(now, again).kind == "no difference seen"


def test_a_trial_that_the_user_stopped_says_nothing_of_the_cell() -> None:
    whole = trial_rows(CELL, [10.0, 10.1, 10.0])
    stopped = [*whole[:2], left_out(CELL, "interrupted", "stopped by the user")[0] | {"trial": 2}]
    assert only(whole, stopped).kind == "no difference seen"
    failed = left_out(CELL, "failed", "the reason")[0] | {"trial": 1}
    assert only(whole, [whole[0], failed, stopped[2]]).kind == "newly failing"


def test_disturbed_trials_are_named_in_every_format() -> None:
    good, bad = trial_rows(CELL, [10.0, 10.1]), trial_rows(CELL, [9.0, 10.0])
    bad[1] |= {"foreign_load_cores": 0.9, "idle_before": 0.5, "idle_after": 1.0}
    bad[0] |= {"foreign_load_cores": 0.01, "idle_before": 0.99, "idle_after": 0.98}
    found = compared(good, bad)
    said = "B, trial 1: 0.90 cores used by others, 50 % idle before, 100 % idle after"
    assert found.lines[0].disturbed == [said]
    assert said in markdown(found)
    assert said in page(found)
    assert found.as_json()["cells"][0]["disturbed"] == [said]


def test_a_folder_stands_for_the_newest_run_of_each_cell() -> None:
    old, new = (
        frames(trial_rows(CELL, [10.0, 10.1]) + trial_rows(OTHER, [5.0, 5.1])),
        frames(trial_rows(CELL, [20.0, 20.1]), NEW),
    )
    both = select("folder", together(old, new))
    assert {(one.label, one.run_id) for one in both.cells} == {("ddp", NEW), ("fsdp2", OLD)}
    elsewhere = frames(trial_rows(CELL, [1.0, 1.1]), "20260103T000000-cccc", cpu_cores=64)
    many = select("folder", together(old, new, elsewhere))
    assert [line.kind for line in compare_sides(many, select("new", new)).lines] == [
        "missing",
        "no difference seen",
    ], "of equal hardware"


def test_a_search_for_the_largest_model_is_no_measurement() -> None:
    search = json.dumps(
        {"cells": [], "trials": 1, "order_seed": 0, "left_out": [], "search": {"budget": 1}}
    )
    assert measured(frames(trial_rows(CELL, [10.0]), plan=search)) == []


def test_nothing_in_common_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="old and new have no cell in common"):
        compared(trial_rows(CELL, [1.0]), trial_rows(OTHER, [1.0]))


def test_two_cells_of_a_run_are_compared_within_its_rounds() -> None:
    """The machine halves its speed in round 1; within each round the second is 3 % slower."""
    drift = [100.0, 50.0, 80.0]
    run = frames(trial_rows(CELL, drift) + trial_rows(OTHER, [0.97 * speed for speed in drift]))
    first, second = measured(run)
    found = compare_cells("run", [(first, second)], ("ddp", "fsdp2"))
    (line,) = found.lines
    assert line.kind == "slower"
    assert line.throughput is not None
    assert line.throughput.ratio == pytest.approx(0.97)
    assert found.headline == "slower 1"
    assert (found.test, line.cell_name) == (COMPARISON_METHOD, f"{OTHER.name} against ddp")
    between = compare_sides(
        select("a", frames(trial_rows(CELL, drift))),
        select("b", frames(trial_rows(CELL, [0.97 * s for s in drift]), NEW)),
    )
    assert between.lines[0].kind == "no difference seen", "two runs have no rounds in common"
    failed = replace(second, result=replace(second.result, status="failed", reason="the reason"))
    assert (
        compare_cells("run", [(first, failed)], ("ddp", "fsdp2")).lines[0].reason
        == "fsdp2 failed: the reason"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three runs: OLD, NEW (slower, one cell missing), and a search after them."""
    store = Store(tmp_path / "results")
    search = json.dumps(
        {"cells": [], "trials": 1, "order_seed": 0, "left_out": [], "search": {"budget": 1}}
    )
    slower = trial_rows(CELL, [90.0, 90.1, 90.2])
    for run_id, rows, plan in (
        (OLD, trial_rows(CELL, [100.0, 100.1, 100.2]) + trial_rows(OTHER, [50.0, 50.1, 50.2]), {}),
        (NEW, slower, {}),
        ("20260103T000000-cccc", trial_rows(CELL, [1.0]), {"plan": search}),
    ):
        store.write_run(RunRecord(**run_row(run_id=run_id, **plan)))
        for row in rows:
            store.write_trial(TrialRecord(**(row | {"run_id": run_id})))
    return store.folder


def test_a_run_is_found_by_what_a_person_types(folder: Path) -> None:
    store = Store(folder)
    assert [
        find_run(store, word) for word in (OLD, "20260101", "latest", "latest~0", "latest~1")
    ] == [OLD, OLD, NEW, NEW, OLD]
    for word, said in (
        ("2026", "is not clear"),
        ("x", "no run 'x'"),
        ("", "no run ''"),
        ("latest~2", "has 2 to compare"),
        ("latest~x", "no run"),
    ):
        with pytest.raises(UsageError, match=said):
            find_run(store, word)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (OLD, "latest~1", "are the same run"),
        ("RESULTS", "RESULTS", "are the same folder"),
        (OLD, "20260103", "20260103T000000-cccc has no recorded trial of a matrix"),
        ("EMPTY", OLD, "no runs in results folder"),
        (OLD, "EMPTY", "no runs in results folder"),
    ],
)
def test_sides_that_cannot_be_compared(
    folder: Path, tmp_path: Path, first: str, second: str, said: str
) -> None:
    (tmp_path / "empty").mkdir()
    names = {"RESULTS": str(folder), "EMPTY": str(tmp_path / "empty")}
    with pytest.raises(UsageError, match=said):
        two_sides(names.get(first, first), names.get(second, second), folder)


def test_a_run_against_its_own_folder_is_a_run_against_the_others(folder: Path) -> None:
    was, now = two_sides(str(folder), "latest", folder)
    assert {one.run_id for one in was.cells} == {OLD}
    assert {one.run_id for one in now.cells} == {NEW}
    was, now = two_sides(OLD, str(folder), folder)
    assert [{one.run_id for one in found.cells} for found in (was, now)] == [{OLD}, {NEW}]


def ask(folder: Path, *words: str) -> tuple[int, str]:
    return commands.ask(compare, *words, "--results", str(folder))


SAID = ("Welch", "0.5 %", "one in 200", "2 were made here", "5 %")


@pytest.mark.parametrize("shape", ["table", "md", "html"])
def test_every_format_says_what_was_found_and_how(folder: Path, shape: str) -> None:
    code, told = ask(folder, "latest~1", "latest", "--format", shape)
    assert code == 0
    for word in (*SAID, "slower", "0.900", "missing", OTHER.name.split()[0], "2 regressions"):
        assert word in told


def test_json_has_the_numbers(folder: Path) -> None:
    code, told = ask(folder, OLD, NEW, "--json")
    found = json.loads(told)
    assert (code, found["regressions"], found["comparisons"]) == (0, 2, 2)
    assert (found["smallest_effect"], found["false_alarm_rate"]) == (0.005, 0.005)
    slower, missing = found["cells"]
    assert slower["ratio"] == pytest.approx(0.9, rel=1e-3)
    assert slower["ratio_low"] < slower["ratio"] < slower["ratio_high"] < 1
    assert (slower["a"]["samples_per_second"], slower["b"]["samples_per_second"]) == (100.1, 90.1)
    assert (missing["kind"], missing["b"]) == ("missing", None)


def test_exit_codes_for_scripts(folder: Path) -> None:
    assert ask(folder, "latest~1", "latest", "--fail-on", "regression")[0] == 1
    assert ask(folder, "latest", "latest~1", "--fail-on", "regression")[0] == 0, (
        "faster and added are news"
    )
    assert ask(folder, "--baseline", "20260101", "--fail-on", "regression")[0] == 1
    assert ask(folder, "latest~1", "latest")[0] == 0


def test_a_guard_that_compares_nothing_is_not_green(folder: Path) -> None:
    elsewhere = Store(folder.parent / "elsewhere")
    elsewhere.write_run(RunRecord(**run_row(run_id=NEW, cpu_cores=64)))
    for row in trial_rows(CELL, [100.0, 100.1]) + trial_rows(OTHER, [100.0, 100.1]):
        elsewhere.write_trial(TrialRecord(**(row | {"run_id": NEW})))
    with pytest.raises(UsageError, match="nothing is guarded"):
        ask(folder, OLD, str(elsewhere.folder), "--fail-on", "regression")
    assert ask(folder, OLD, str(elsewhere.folder))[0] == 0


def test_a_named_baseline_is_a_folder_below_the_results(folder: Path) -> None:
    kept = Store(folder / "reference" / "release")
    kept.write_run(RunRecord(**run_row(run_id=OLD)))
    for row in trial_rows(CELL, [45.0, 45.1]):
        kept.write_trial(TrialRecord(**(row | {"run_id": OLD})))
    found = json.loads(ask(folder, "--baseline", "release", "--json")[1])
    assert found["a"].endswith("reference/release")
    assert found["cells"][0]["ratio"] == pytest.approx(2.0, rel=1e-2)


def test_cells_of_one_run_from_the_command_line(folder: Path) -> None:
    """A label means the cell of this label, not all cells of the strategy of this name."""
    for row in trial_rows(
        Cell(strategy="ddp", devices=2, options={"static_graph": True}), [1.0, 1.1]
    ):
        Store(folder).write_trial(TrialRecord(**(row | {"run_id": OLD})))
    assert len(json.loads(ask(folder, OLD, "--cells", "ddp*", "fsdp2", "--json")[1])["cells"]) == 2
    code, told = ask(folder, OLD, "--cells", "ddp", "fsdp*", "--json")
    (line,) = json.loads(told)["cells"]
    assert (code, line["kind"]) == (0, "slower")
    assert line["ratio"] == pytest.approx(0.5, rel=1e-3)
    for words, said in (
        ([OLD, "--cells", "dpp", "ddp"], "'dpp' is no label"),
        ([OLD, "--cells", "ddp", "ddp"], "in one setting"),
        ([OLD, NEW, "--cells", "ddp", "fsdp2"], "cells of one run"),
        ([OLD], "two runs or folders, not of 1"),
        ([], "not of 0"),
        ([OLD, NEW, "--baseline", OLD], "not of 3"),
    ):
        with pytest.raises(UsageError, match=re.escape(said)):
            ask(folder, *words)


@pytest.mark.parametrize("name", ["page.html", "comment.md", "numbers.json", "table.txt"])
def test_a_files_name_tells_its_format(folder: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    assert ask(folder, "latest~1", "latest", "--out", str(path)) == (0, f"{path}\n")
    text = path.read_text()
    begins = {
        "page.html": "<!DOCTYPE html>",
        "comment.md": "### ",
        "numbers.json": "{",
        "table.txt": "A: ",
    }[name]
    assert text.lstrip().startswith(begins)
    assert "\x1b" not in text
    with pytest.raises(UsageError, match="cannot be written"):
        ask(folder, "latest~1", "latest", "--out", str(tmp_path))


def test_the_page_loads_nothing_and_allows_its_own_script_only() -> None:
    text = page(compared(trial_rows(CELL, [10.0, 10.1]), trial_rows(CELL, [9.0, 9.1])))
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert (
            f"{tag}-src"
            f" 'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
            in policy
        )
    assert not re.findall(r"(?:src|href)=\"(?!#)", text)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_only_text(text: str) -> None:
    odd = {"cell_name": text, "label": text}
    was = trial_rows(CELL, [10.0, 10.1], **odd) + trial_rows(OTHER, [10.0, 10.1], **odd)
    now = trial_rows(CELL, [9.0, 9.1], **odd) + left_out(OTHER, "failed", text, **odd)
    found = compared(was, now, torch_version=text)
    html = page(found)
    assert html.count("<script>") == 1
    assert "<img" not in html
    assert "1337" not in html
    assert not set(html) & set("\x00\x08\x1b\u202e")
    comment = markdown(found)
    assert "<script" not in comment
    assert "<img" not in comment


def test_markdown_keeps_its_table_whole() -> None:
    odd = trial_rows(CELL, [10.0, 10.1], cell_name="a|b `c` @someone\n**d**")
    text = markdown(
        compared(odd, [row | {"samples_per_second": row["samples_per_second"] / 2} for row in odd])
    )
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {8}
    assert "@" not in text
    assert r"a\|b \`c\` &commat;someone \*\*d\*\*" in text


def test_numbers_of_the_page_are_those_of_the_comparison() -> None:
    found = compared(trial_rows(CELL, [10.0, 10.1]), trial_rows(CELL, [9.0, 9.1]))
    speed = found.lines[0].throughput
    assert speed is not None
    (ratio,) = re.findall(r'data-sort="([0-9.]+)">0\.9', page(found))
    assert float(ratio) == speed.ratio == pytest.approx(math.sqrt(9.0 * 9.1 / 10.0 / 10.1))
