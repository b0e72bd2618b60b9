"""The report: what it shows equals what was recorded, and nothing that was recorded can do harm in
it."""

from __future__ import annotations

import ast
import base64
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Sequence
from datetime import datetime, timezone
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bench.cli import terminal as show
from bench.cli.report import report
from harness.analysis.cell_result import CellResult
from harness.analysis.stats import median_error
from harness.analysis.summary import cell_results
from harness.analysis.summary import cells as summarise
from harness.analysis.systems import systems
from harness.record.run import RunRecord
from harness.record.store import Results, Store
from harness.record.trial import TrialRecord
from harness.spec.cell import Cell
from harness.spec.errors import UsageError
from harness.strategy.registry import strategies
from reports import rank_peaks, traffic, write_report
from reports import states as kept
from reports.bubble import bubble_theory
from reports.data import throughput_bars
from reports.groups import find_groups, headline, pareto
from reports.scaling import scaling
from reports.stacks import state_stacks
from reports.systems import all_systems, not_run, overview
from reports.text import deviation, number, shortened, signed, size
from reports.variants import variants
from reports.wrappers import wrappers
from tests.unit.recording import left_out_fields

REFERENCE = [4.0, 3.5, 3.1, 2.9]
MIB = 2**20


def run_row(**changes: Any) -> dict[str, Any]:
    row = {
        "schema_version": 1,
        "run_id": "20260101T000000-abcd",
        "started_at": datetime(2026, 1, 1, tzinfo=timezone.utc),
        "matrix": "full",
        "plan": json.dumps({"cells": [], "trials": 3, "order_seed": 7, "left_out": []}),
        "host": "bench-host",
        "operating_system": "Linux",
        "python_version": "3.11.7",
        "torch_version": "2.13.0",
        "libraries": json.dumps({"numpy": "2.4.6"}),
        "cpu_model": "Example CPU",
        "cpu_cores": 2,
        "memory_bytes": 8 * 2**30,
        "gpus": [],
        "gpu_memory_bytes": None,
        "git_commit": "0123abc",
        "suite_version": "0.1.0",
    }
    return row | changes


def trial_rows(
    cell: Cell, speeds: Sequence[float], peak_mib: float = 100.0, **changes: Any
) -> list[dict[str, Any]]:
    """Finished trials of a cell, one per throughput (samples/s), everything else filled in."""
    rows = []
    for trial, speed in enumerate(speeds):
        row = left_out_fields("20260101T000000-abcd", cell, "ok", "") | {
            "trial": trial,
            "position": trial,
            "wall_seconds": 2.0,
            "startup_seconds": 0.2,
            "setup_seconds": 0.123456789,
            "first_step_seconds": 0.4,
            "processes": cell.devices,
            "data_parallel": cell.devices,
            "pipeline_parallel": 1,
            "tensor_parallel": 1,
            "stand_in": None,
            "parameters": 1000,
            "step_seconds_p50": cell.global_batch / speed,
            "step_seconds_p95": cell.global_batch / speed * 1.1,
            "samples_per_second": speed,
            "tokens_per_second": None if cell.data == "images" else speed * cell.sequence_length,
            "trend": 0.0,
            "peak_memory_bytes": int((peak_mib + trial) * MIB),
            "memory_imbalance": 1.05,
            "memory_method": "counted by hand",
            "losses": [loss * (1 + 1e-7) for loss in REFERENCE],
            "reference_losses": REFERENCE,
            "parity_verdict": "exact",
            "parity_reason": "",
            "parity_max_loss_deviation": 1.25e-7,
            "parity_max_update_deviation": 3e-5,
            "parity_loss_tolerance": 1e-5,
            "parity_update_tolerance": 1e-3,
        }
        rows.append(row | changes)
    return rows


def diverged_rows(cell: Cell, **changes: Any) -> list[dict[str, Any]]:
    more: dict[str, Any] = {
        "status": "diverged",
        "reason": "loss is not finite at step 2",
        "parity_verdict": "diverged",
        "parity_reason": "loss is not finite at step 2",
        "parity_max_loss_deviation": None,
        "losses": [4.0, 5.5, math.nan, math.nan],
        "log_tail": "the last line of the log",
    }
    return trial_rows(cell, [9999.0, 9998.0], **more | changes)


def left_out(cell: Cell, status: str, reason: str, **changes: Any) -> list[dict[str, Any]]:
    return [left_out_fields("20260101T000000-abcd", cell, status, reason) | changes]


def stored(folder: Path, rows: Sequence[dict[str, Any]], **run: Any) -> Results:
    """The rows as they come back from a results folder."""
    store = Store(folder)
    store.write_run(RunRecord(**run_row(**run)))
    for row in rows:
        store.write_trial(TrialRecord(**row))
    return store.load()


class Page(HTMLParser):
    """What a reader's browser would make of a page: tags with attributes, rows of cells, text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: dict[str, dict[str, str]] = {}
        self.grids: list[tuple[str, str, str]] = []
        """Cell id, field and value of each number of the small tables."""
        self.words: list[str] = []
        self._row = self._line = ""
        self._skipping = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag == "tr":
            self._row, self._line = found.get("id") or "", found.get("data-cell") or ""
        if self._row and found.get("data-field"):
            self.rows.setdefault(self._row, {})[str(found["data-field"])] = (
                found["data-value"] or ""
            )
        if self._line and found.get("data-field"):
            self.grids.append((self._line, str(found["data-field"]), found["data-value"] or ""))
        self._skipping = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._skipping = False
        if tag not in ("a", "b", "bdi"):
            self.words.append(" ")
        if tag == "tr":
            self._row = self._line = ""

    def handle_data(self, data: str) -> None:
        if not self._skipping:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    @property
    def headings(self) -> list[str]:
        return [str(a["id"]) for tag, a in self.tags if tag == "h2"]


def page_of(results: Results, folder: Path) -> Page:
    return Page(write_report(results, folder / "page.html").read_text())


STATES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "library_bytes")
BUCKETS = "gradient buckets"


def states(
    *sizes: Sequence[int], formula: Sequence[float] | None = None, **more: Any
) -> dict[str, Any]:
    """Columns of what each rank keeps (parameters, gradients, optimizer, library), in MiB."""
    columns: dict[str, Any] = {
        name: [rank[kind] * MIB for rank in sizes] for kind, name in enumerate(STATES)
    }
    columns |= {
        f"formula_{name}": value * MIB for name, value in zip(STATES, formula or (), strict=False)
    }
    columns |= {
        "host_state_bytes": [0] * len(sizes),
        "library_buffers": json.dumps({BUCKETS: sizes[0][3] * MIB, "tiny": 8}),
    }
    return columns | more


def sharded() -> list[dict[str, Any]]:
    """Cells with states, traffic, wrappers, variants and a disk; systems of which all, some and no
    cells ran."""
    system = "3 wrapped"
    whole = states(
        (4, 0, 8, 4),
        (4, 0, 8, 4),
        formula=(4, 0, 8, 4),
        trained_parameters=MIB,
        parameters=MIB,
        wraps_ddp="torchrun",
    )
    sent = {"sent_bytes_per_step": [4.0 * MIB, 3.9 * MIB]}
    rows = trial_rows(
        Cell(strategy="plain", devices=2, system=system), [50.0, 51.0, 49.0], **whole, **sent
    )
    rows += trial_rows(
        Cell(strategy="wrap", devices=2, system=system),
        [40.0, 41.0, 39.0],
        **{**whole, **sent, "wraps_ddp": "Wrapper"},
    )
    cut = states(
        (2, 0, 4, 0), (1, 0, 2, 1), formula=(2, 0, 5, 0), trained_parameters=MIB, parameters=MIB
    )
    disk = {
        "offload_read_bytes_per_step": 3.0 * MIB,
        "offload_written_bytes_per_step": 5.0 * MIB,
        "offload_kept_bytes": 7 * MIB,
    }
    peaks = {"peak_memory_bytes_by_rank": [100 * MIB, 50 * MIB]}
    cell = Cell(strategy="sharded", devices=2, system="10 disks")
    rows += trial_rows(
        cell, [30.0, 31.0], **cut, **disk, **peaks, sent_bytes_per_step=[6.0 * MIB, 2.0 * MIB]
    )
    few = states(
        (4, 0, 1, 1),
        (4, 0, 1, 1),
        trained_parameters=MIB // 8,
        parameters=MIB,
        fp32_loss_deviation=0.003,
    )
    cell = Cell(strategy="plain", devices=2, workload="llama-mini+nf4+lora", system="21 adapters")
    rows += trial_rows(cell, [60.0, 61.0], **few, sent_bytes_per_step=[0.5 * MIB, 0.5 * MIB])
    rows += left_out(
        Cell(strategy="disk", devices=2, system="10 disks"),
        "unavailable",
        "there is no disk: mount one",
    )
    needed = "package rare is not installed: pip install rare"
    rows += left_out(Cell(strategy="rare", devices=2, system="6 Rare"), "unavailable", needed)
    rows += left_out(
        Cell(strategy="rare", devices=2, options={"a": 1}, system="6 Rare"), "unavailable", needed
    )
    rows += left_out(
        Cell(strategy="rare", devices=3, system="6 Rare"), "refused", "batch 8 does not divide by 3"
    )
    return rows


def typical() -> list[dict[str, Any]]:
    """Everything that a run can bring: intervals that overlap, one trial only, stand-ins, failures
    of all kinds."""
    many = trial_rows(Cell(strategy="fast", devices=2), [70.0, 71.0, 72.0], peak_mib=300)
    many += trial_rows(Cell(strategy="near", devices=2), [69.0, 71.0, 70.5], peak_mib=200)
    many += trial_rows(
        Cell(strategy="small", devices=2, micro_batches=4),
        [30.0, 30.1, 30.2],
        50,
        pipeline_parallel=2,
        bubble_fraction=0.31,
    )
    many += trial_rows(
        Cell(strategy="once", devices=2), [20.0], stand_in="threads instead of devices", trend=0.07
    )
    many += trial_rows(Cell(strategy="crowd", devices=8), [5.0, 5.5], oversubscribed=True)
    many += trial_rows(Cell(strategy="fast", devices=1), [40.0, 41.0, 40.5])
    many += trial_rows(
        Cell(strategy="fast", devices=2, data="images", workload="resnet-micro"), [9.0, 9.1]
    )
    many += diverged_rows(Cell(strategy="wrong", devices=2))
    many += diverged_rows(Cell(strategy="known", devices=2, expect="diverged"), expected=True)
    many += left_out(
        Cell(strategy="broken", devices=2),
        "failed",
        "rank 1: it broke; mend it",
        log_tail="Traceback of rank 1",
    )
    many += left_out(
        Cell(strategy="absent", devices=2),
        "unavailable",
        "package absent is not installed: pip install absent",
    )
    many += left_out(Cell(strategy="odd", devices=3), "refused", "batch 8 does not divide by 3")
    return many


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    planned = json.loads(Cell(strategy="later", devices=2).model_dump_json())
    plan = json.dumps({"cells": [planned], "trials": 3, "order_seed": 7, "left_out": []})
    return stored(tmp_path_factory.mktemp("typical"), typical(), plan=plan)


@pytest.fixture(scope="module")
def page(results: Results, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_of(results, tmp_path_factory.mktemp("page"))


def test_every_number_of_the_table_equals_the_frames(results: Results, page: Page) -> None:
    frame = summarise(results.trials).set_index("cell_id")
    assert {f"cell-{cell_id}" for cell_id in frame.index} == set(page.rows)
    compared = 0
    for cell_id, row in frame.iterrows():
        shown = page.rows[f"cell-{cell_id}"]
        for field, value in shown.items():
            if field == "place":  # a rank, not a column
                continue
            expected = row[field]
            if expected is None or math.isnan(expected):
                assert value == "", (cell_id, field)
            else:
                assert float(value) == expected, (cell_id, field)
                compared += 1
        assert {
            "peak_memory_bytes",
            "step_seconds_p50",
            "step_seconds_p95",
            "setup_seconds",
            "parity_max_loss_deviation",
        } <= set(shown)
    assert compared > 100


def test_throughput_has_its_interval(results: Results, page: Page) -> None:
    cell = Cell(strategy="fast", devices=2)
    shown = page.rows[f"cell-{cell.id}"]
    assert float(shown["tokens_per_second"]) == pytest.approx(71 * 64)
    assert float(shown["tokens_per_second_low"]) == pytest.approx(
        (71 - 4.302652729749464 * median_error(3) / math.sqrt(3)) * 64
    )
    assert "tokens_per_second_low" not in page.rows[f"cell-{Cell(strategy='once', devices=2).id}"]
    image = page.rows[
        f"cell-{Cell(strategy='fast', devices=2, data='images', workload='resnet-micro').id}"
    ]
    assert float(image["samples_per_second"]) == pytest.approx(9.05)


def test_verdict_names_the_fastest_and_the_most_frugal(page: Page) -> None:
    verdict = page.text[page.text.index("Fastest") : page.text.index("Higher is better")]
    assert "fast 4,544 tokens/s 95 % interval" in verdict
    assert "cannot be told apart from near" in verdict
    assert "small (micro_batches=4) 52.0 MiB" in verdict
    assert "7 of 9 cells" in verdict
    assert "2 cells diverged and are not ranked; 1 of them as expected" in verdict


def test_headline_is_a_comparison_and_says_where_there_is_none(tmp_path: Path) -> None:
    rows = trial_rows(Cell(strategy="a"), [2.0, 2.1]) + trial_rows(Cell(strategy="b"), [1.0, 1.1])
    rows += trial_rows(Cell(strategy="a", devices=2), [3.0, 3.1])
    page = page_of(stored(tmp_path / "two", rows), tmp_path)
    assert (
        "on 1 device · fp32 · batch 8 of 64 tokens · 1 core per device, where nothing is"
        " communicated, 2 strategy variants" in page.text
    )
    assert "Nothing to compare" not in page.text
    alone = page_of(stored(tmp_path / "one", rows[:2]), tmp_path)
    assert "Nothing to compare" in alone.text


def test_diverged_cells_have_no_place(page: Page) -> None:
    places = {
        name: page.rows[f"cell-{Cell(strategy=name, devices=2).id}"]["place"]
        for name in ("fast", "near", "once", "wrong")
    }
    assert places == {"fast": "1", "near": "2", "once": "4", "wrong": ""}
    assert "2 ≈ 1" in page.text


def test_flags_and_failures_are_told(page: Page) -> None:
    flags = (
        "stand-in threads instead of devices",
        "oversubscribed more ranks than cores",
        "1 trial: no interval",
        "expected to diverge",
    )
    failures = (
        "rank 1: it broke; mend it",
        "Traceback of rank 1",
        "loss is not finite at step 2",
        "the last line of the log",
    )
    left = (
        "package absent is not installed: pip install absent",
        "batch 8 does not divide by 3",
        "later llama-mini x2",
    )
    for words in (
        *flags,
        "steps still changed by 7 %",
        *failures,
        *left,
        "the run ended before it; resume the run to launch it",
    ):
        assert words in page.text, words


def test_unknown_is_a_dash_and_never_nan(page: Page) -> None:
    assert "—" in page.text
    shown = [page.text, *(value for _, found in page.tags for value in found.values() if value)]
    assert not [text for text in shown if re.search(r"\b(nan|NaT|None|inf)\b", text)]


def test_sections_come_in_order_and_only_with_data(page: Page, tmp_path: Path) -> None:
    first = [
        "verdict",
        "ranking",
        "memory",
        "front",
        "scaling",
        "parity",
        "bubble",
        "cells",
        "failures",
    ]
    assert page.headings == [*first, "environment", "method", "glossary"]
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
    (policy,) = [str(a["content"]) for tag, a in page.tags if tag == "meta" and a.get("http-equiv")]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


HOSTILE = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror=alert(1)>'",
    "{{ 7 * 191 }} $\\frac{1}{0}$ ]]> &amp;",
    "\u202egnp.exe \u05e9\u05dc\u05d5\u05dd",
    "\x00\x08\x1b[31m",
    "x" * 3000,
)


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


def test_run_where_nothing_passed_says_so(tmp_path: Path) -> None:
    page = page_of(stored(tmp_path, diverged_rows(Cell(strategy="wrong"))), tmp_path)
    assert "nothing is ranked" in page.text


def test_report_is_of_one_run(tmp_path: Path, results: Results) -> None:
    empty = Results(results.runs.iloc[:0], results.trials.iloc[:0], results.steps.iloc[:0])
    with pytest.raises(ValueError, match="one run, not of 0"):
        write_report(empty, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "—"),
        (math.nan, "—"),
        (math.inf, "—"),
        (0, "0"),
        (0.0123456, "0.0123"),
        (1.23e-7, "1.2e-07"),
        (12345.6, "12,346"),
        (-1.5, "-1.50"),
        (9.996, "10.00"),
    ],
)
def test_number(value: float | None, shown: str) -> None:
    assert number(value) == shown


def test_deviation_and_shortened() -> None:
    assert (deviation(0.0), deviation(None), deviation(1.25e-7)) == ("0", "—", "1.2e-07")
    assert shortened("a" * 60, 20) == "a" * 12 + "…" + "a" * 7
    assert [signed(value) for value in (0.0104, -0.5, -1e-9, None)] == [
        "+1.0 %",
        "−50.0 %",
        "+0.0 %",
        "—",
    ]
    assert [size(value) for value in (64, 2048, 3.5 * MIB, 2**31, None)] == [
        "64 bytes",
        "2.00 KiB",
        "3.50 MiB",
        "2.00 GiB",
        "—",
    ]


def test_figure_data_by_hand(results: Results) -> None:
    cells = cell_results(results.trials)
    group = headline(find_groups(cells))
    assert group is not None
    assert [row.label for row in group.rows] == [
        "fast",
        "near",
        "small(micro_batches=4)",
        "once",
    ]
    assert [row.label for row in pareto(group)] == ["fast", "near", "small(micro_batches=4)"]
    bars = throughput_bars(group, "x").bars
    assert [bar.strong for bar in bars] == [True, True, False, False]
    assert bars[3].label == "once†"
    assert (bars[3].low, bars[3].high) == (None, None)
    (strong,) = scaling(cells, "strong")
    assert strong.ideal == ((1, 40.5 * 64), (2, 81.0 * 64))
    assert bubble_theory(2, 4) == pytest.approx(1 / 5)


def test_no_strategy_is_named_in_the_code() -> None:
    known = set(strategies()) - {
        column.name for column in TrialRecord.columns()
    }  # a column and a strategy have the same name
    for path in sorted((Path(__file__).parents[2] / "reports").rglob("*.py")):
        constants = [
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant)
        ]
        words = {value for value in constants if isinstance(value, str)}
        assert not words & known, path


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return stored(tmp_path_factory.mktemp("more"), sharded())


@pytest.fixture(scope="module")
def more_page(more: Results, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_of(more, tmp_path_factory.mktemp("more-page"))


def rows_of(results: Results) -> dict[str, CellResult]:
    """The cells by label, workload and, past 2, devices, in the order of the ranking."""
    return {
        f"{cell.label} {cell.workload}" + (f" x{cell.devices}" if cell.devices > 2 else ""): cell
        for cell in cell_results(results.trials)
    }


def test_every_number_of_the_small_tables_equals_the_frames(more: Results, more_page: Page) -> None:
    frame = summarise(more.trials).set_index("cell_id")
    compared = set()
    for cell_id, field, value in more_page.grids:
        if field in frame.columns:
            expected = frame.loc[cell_id, field]
            assert (
                value == ""
                if expected is None or math.isnan(expected)
                else float(value) == expected
            ), (cell_id, field)
            compared.add(field)
    states_ = {"state_bytes", "optimizer_bytes", "formula_bytes", "offload_kept_bytes"}
    assert (
        states_ | {"sent_bytes_per_step", "trained_parameters", "fp32_loss_deviation"} <= compared
    )


def test_sections_of_states_and_libraries_come_in_order(more_page: Page) -> None:
    first = [
        "verdict",
        "systems",
        "ranking",
        "memory",
        "front",
        "scaling",
        "states",
        "traffic",
        "parity",
        "wrappers",
        "variants",
    ]
    assert [name for name in more_page.headings if name != "scaling"] == [
        *[name for name in first if name != "scaling"],
        "cells",
        "failures",
        "environment",
        "method",
        "glossary",
    ]


def test_systems_that_are_not_on_this_host_come_first(more: Results, more_page: Page) -> None:
    rows = list(rows_of(more).values())
    found = systems(rows)
    assert [one.name for one in found] == [
        "3 wrapped",
        "6 Rare",
        "10 disks",
        "21 adapters",
    ], "by their numbers, not as text"
    later = Cell(strategy="late", system="30 later")
    absent, later_one, part = not_run(all_systems(rows, [later]))
    assert (absent.system, absent.kind, absent.launched, absent.total) == ("6 Rare", "absent", 0, 3)
    assert [(one.what, len(one.names)) for one in absent.reasons] == [
        ("not available here", 2),
        ("cannot exist", 1),
    ]
    assert (part.system, part.kind, part.launched, part.total) == ("10 disks", "part", 1, 2)
    assert (later_one.system, later_one.kind) == ("30 later", "none")
    assert "resume the run" in later_one.reasons[0].reason
    text = more_page.text
    assert "Not on this host 6 Rare. Why, and what would change it" in text
    assert text.index("6 Rare none of 3 cells ran") < text.index("10 disks 1 of 2 cells ran")
    for words in ("pip install rare", "there is no disk: mount one"):
        assert words in text


def test_overview_of_systems(more: Results) -> None:
    cells = cell_results(more.trials)
    groups = find_groups(cells)
    wrapped, rare, disks, adapters = overview(systems(cells), groups, headline(groups))
    assert (wrapped.ok, wrapped.total, wrapped.status, wrapped.parity) == (
        2,
        2,
        "all ran",
        "2 exact",
    )
    assert wrapped.best is not None
    assert (wrapped.best.row.label, wrapped.best.share, wrapped.best.setting) == (
        "plain",
        "100 %",
        "",
    )
    assert wrapped.best.value == "3,200 ± 185 tokens/s"
    assert (rare.ok, rare.total, rare.status, rare.best, rare.parity) == (
        0,
        3,
        "not on this host",
        None,
        "",
    )
    assert rare.details == ("2 not available here", "1 cannot exist")
    assert (disks.status, disks.best and disks.best.share) == ("ran in part", "61 %")
    assert adapters.best is not None
    assert adapters.best.setting == "llama-mini+nf4+lora · 2 devices · fp32 · batch 8"
    halted = [
        dataclasses.replace(cell, status="interrupted")
        if cell.system == wrapped.name and cell.label != "plain"
        else cell
        for cell in cells
    ]
    assert overview(systems(halted), groups, headline(groups))[0].status == "ran in part"
    plain = [dataclasses.replace(cell, system=None) for cell in cells]
    assert overview(systems(plain), groups, headline(groups)) == []


def test_states_against_the_formula(more: Results) -> None:
    rows = rows_of(more)
    (chart,) = kept.charts(list(rows.values()))
    sharded_, plain, wrapped = chart.stacks
    assert (sharded_.label, sharded_.parts, sharded_.formula) == (
        "sharded",
        (2.0, 0.0, 4.0, 0.0),
        7.0,
    ), "the fullest rank"
    assert (sharded_.text, sharded_.off) == ("6.00 MiB −14.3 %", True)
    assert {plain.label, wrapped.label} == {"plain", "wrap"}
    assert (plain.parts, plain.formula, plain.peak, plain.text, plain.off) == (
        (4.0, 0.0, 8.0, 4.0),
        16.0,
        102.0,
        "16.0 MiB +0.0 %",
        False,
    )
    buffers = {
        one.names: [row.label for row in one.rows] for one in kept.buffers(list(rows.values()))
    }
    assert buffers[(BUCKETS, "4.00 MiB"), ("1 smaller one", "8 bytes")] == ["plain", "wrap"]
    far = dataclasses.replace(
        rows["wrap llama-mini"], library_bytes=2000 * MIB, state_bytes=2012 * MIB
    )
    rest = [rows["plain llama-mini"], rows["sharded llama-mini"]]
    stacked = state_stacks([far, *rest], "x", "title", lambda cell: cell.label)
    assert stacked.limit < 200
    assert stacked.stacks[-1].total == 2012
    assert "goes on beyond the axis" in stacked.notes[0]


def test_uneven_memory_by_rank(more: Results) -> None:
    chart = rank_peaks.chart(list(rows_of(more).values()))
    assert chart is not None
    ((label, shares, text),) = chart.lines
    assert (label, text) == ("sharded x2 fp32", "1.33 · 100 MiB")
    assert shares == pytest.approx((100 / 75 * 100, 50 / 75 * 100))


def test_traffic_against_the_ring(more: Results) -> None:
    rows = rows_of(more)
    (chart,) = traffic.charts(list(rows.values()))
    assert [(bar.label, bar.value, bar.target, bar.strong) for bar in chart.bars] == [
        ("plain", 1.0, 1.0, True),
        ("wrap", 1.0, 1.0, True),
        ("sharded", 1.5, 1.0, False),
    ]
    assert traffic.sent(rows["plain llama-mini+nf4+lora"]) == 1.0, "an eighth is trained, and sent"
    plain = rows["plain llama-mini"]
    assert traffic.bound(dataclasses.replace(plain, data_parallel=4, devices=4)) == 1.5
    assert traffic.bound(dataclasses.replace(plain, data_parallel=2, devices=4)) is None, (
        "a rank does not have the whole model"
    )
    assert traffic.bounds_in_words(list(rows.values())) == "1.00 x for 2 ranks"
    disk = traffic.offload(list(rows.values()))
    assert disk is not None
    (line,) = disk.rows
    shown = {td.parts[0].field: td.parts[0].text for td in line.cells}
    assert shown["offload_read_bytes_per_step"] == "3.00"
    assert shown["offload_kept_bytes"] == "7.00"
    assert shown["state_bytes"] == "6.00"


def test_wrappers_cost(more: Results, more_page: Page) -> None:
    (one,) = wrappers(list(rows_of(more).values()))
    assert [bar.label for bar in one.bars.bars] == ["torchrun", "Wrapper"]
    fast, slow = (line.row for line in one.grid.rows)
    assert (fast.step_ratio, fast.extra_seconds) == (1.0, 0.0)
    assert slow.step_ratio == pytest.approx(1.25)
    assert slow.extra_seconds == pytest.approx(8 / 40 - 8 / 50)
    assert "wrap Wrapper" in more_page.text


def test_variants_beside_their_model(more: Results) -> None:
    (one,) = variants(list(rows_of(more).values()))
    assert [line.row.workload for line in one.grid.rows] == ["llama-mini", "llama-mini+nf4+lora"]
    titles = [column.title for column in one.grid.columns]
    cells = {
        title: td.parts[0].text for title, td in zip(titles, one.grid.rows[1].cells, strict=True)
    }
    assert (cells["Trained"], cells["Of all"], cells["Optimizer"], cells["Distance to fp32"]) == (
        "131,072",
        "12 %",
        "1.00",
        "3.0e-03",
    )
    assert one.stacks is not None
    assert [stack.label for stack in one.stacks.stacks] == ["llama-mini+nf4+lora", "llama-mini"]


def searched(folder: Path) -> Results:
    """A search of two strategies: `less` reaches 3 blocks, `more` 2, though theory has it the other
    way round."""
    family = {"workload": "llama-64x1", "devices": 2, "memory_limit_bytes": MIB}
    cells = [Cell(strategy=name, **family) for name in ("less", "more", "never")]
    known = {
        cell.id: {"step": 10, "blocks": 4, "parameters": 40, "activations": [0, 0]}
        for cell in cells
    }
    search = {"budget": MIB, "order": [["less", "more"]], "predicted": known}
    plan = {
        "cells": [json.loads(c.model_dump_json()) for c in cells],
        "trials": 1,
        "order_seed": 0,
        "left_out": [],
        "search": search,
    }
    rows = []
    for cell, most in zip(cells, (3, 2), strict=False):
        for blocks, status in ((most, "ok"), (most + 1, "out_of_memory")):
            sized = cell.model_copy(update={"workload": f"llama-64x{blocks}"})
            probe = states(
                (1, 0, 2, 0), (1, 0, 2, 0), trained_parameters=10 * blocks, parameters=10 * blocks
            )
            (row,) = trial_rows(
                sized,
                [5.0],
                **probe,
                status=status,
                parity_verdict="unknown" if status == "ok" else None,
            )
            rows.append(
                row
                | ({"samples_per_second": None, "failed_in": "backward"} if status != "ok" else {})
            )
            if status == "ok":
                (row,) = trial_rows(sized, [5.0], **probe)
                rows.append(row | {"trial": 1})
    return stored(folder, rows, matrix="maxsize", plan=json.dumps(plan))


def test_largest_trainable_model(tmp_path: Path) -> None:
    page = page_of(searched(tmp_path), tmp_path)
    assert page.headings[:3] == ["verdict", "largest", "states"]
    assert (
        "Within 1.00 MiB per rank, the largest model that trains here has 30 parameters, under less"
        in page.text
    )
    assert "Measured: more 0.0M < less 0.0M; theory has less < more" in page.text
    assert "not the theory's order" in page.text
    shown: dict[str, list[str]] = {}
    for _, field, value in page.grids:
        shown.setdefault(field, []).append(value)
    assert (shown["reached"], shown["next"], shown["ratio"]) == (
        ["30", "20"],
        ["40", "30"],
        ["0.75", "0.5"],
    )
    assert "never" in page.text, "nothing was tried of it yet"
    assert (
        len(
            [
                tag
                for tag, found in page.tags
                if tag == "tr" and str(found.get("id")).startswith("cell-")
            ]
        )
        == 2
    ), "probes are no cells"
    assert "failures" not in page.headings, "a probe that does not fit is no failure"


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_runs_of_older_versions_have_their_report(version: str, tmp_path: Path) -> None:
    golden = Store(Path(__file__).parents[1] / "golden" / version)
    page = page_of(golden.load(golden.run_ids()[:1]), tmp_path)
    assert {"verdict", "cells", "environment"} <= set(page.headings)
    assert ("states" in page.headings) == (version != "v1")


def test_the_terminal_names_systems_that_are_not_on_this_host(
    more: Results, results: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    show.ranking(show.console(), cell_results(more.trials))
    assert "not on this host: 6 Rare; each reason below" in capsys.readouterr().out
    here = more.trials[more.trials["system"] == "3 wrapped"]
    show.ranking(show.console(), cell_results(here))
    assert "not on this host" not in capsys.readouterr().out


def test_nodes_are_a_column_only_where_a_cell_has_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (Cell(strategy="spread", devices=4, nodes=n) for n in (1, 2))
    rows = trial_rows(one, [9.0, 9.1, 9.2]) + trial_rows(Cell(strategy="spread"), [4.0, 4.1, 4.2])
    page = page_of(stored(tmp_path / "one", rows), tmp_path)
    assert "nodes" not in page.rows[f"cell-{one.id}"]
    several = stored(tmp_path / "several", rows + trial_rows(two, [7.0, 7.1, 7.2]))
    page = page_of(several, tmp_path)
    assert [page.rows[f"cell-{cell.id}"]["nodes"] for cell in (one, two)] == ["1", "2"]
    assert [
        value for cell, field, value in page.grids if field == "nodes" and cell in (one.id, two.id)
    ] == ["1", "2"], "of the efficiency"
    show.ranking(show.console(), cell_results(several.trials[several.trials["nodes"] == 1]))
    assert "nodes" not in capsys.readouterr().out
    show.ranking(show.console(), cell_results(several.trials))
    table = [line for line in capsys.readouterr().out.splitlines() if "│" in line or "┃" in line]
    split = [[word.strip() for word in line.replace("┃", "│").split("│")] for line in table]
    place = split[0].index("nodes")
    assert [line[place] for line in split[1:]] == ["1", "2", "1"], "fastest first"


def test_cells_beside_which_others_used_the_machine_are_marked_in_words(tmp_path: Path) -> None:
    busy, calm = Cell(strategy="busy", devices=2), Cell(strategy="calm", devices=2)
    rows = trial_rows(calm, [9.0, 9.1])
    page = page_of(stored(tmp_path / "calm", rows), tmp_path)
    assert "¶" not in page.text
    disturbed = trial_rows(busy, [8.0, 8.1, 8.2])
    for row in disturbed[1:]:
        row["foreign_load_cores"] = 0.5
    page = page_of(stored(tmp_path / "busy", rows + disturbed), tmp_path)
    assert "busy ¶" in page.text.replace("busy¶", "busy ¶")
    assert "calm¶" not in page.text.replace("calm ¶", "calm¶")
    assert "¶: something else used the machine beside some of its trials" in page.text
    assert "¶ disturbed something else used the machine beside 2 of 3 trials" in page.text


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


def test_a_cell_with_more_ranks_than_cores_neither_leads_nor_hides_its_group(
    tmp_path: Path,
) -> None:
    """A parameter server beside the devices' ranks: its group stays the verdict's, and another cell
    is its fastest."""
    rows = trial_rows(Cell(strategy="a", devices=2), [50.0, 51.0]) + trial_rows(
        Cell(strategy="b", devices=2), [40.0, 41.0]
    )
    rows += trial_rows(
        Cell(strategy="served", devices=2), [90.0, 91.0], peak_mib=50, oversubscribed=True
    )
    rows += trial_rows(Cell(strategy="a"), [30.0, 31.0]) + trial_rows(
        Cell(strategy="b"), [30.0, 31.0]
    )
    verdict = page_of(stored(tmp_path, rows), tmp_path).text.split("Every workload")[0]
    assert "on 2 devices" in verdict
    assert "Fastest a 3,232 tokens/s" in verdict
    assert (
        "A cell with more ranks than cores was faster, which says nothing of the real thing:"
        " served‡, 5,792 tokens/s" in verdict
    )
    assert "Least memory served ‡ 51.0 MiB" in verdict.replace("served‡", "served ‡"), (
        "its memory is its own"
    )
    assert "of its throughput" not in verdict


def test_a_stand_in_does_not_lead_the_verdict(tmp_path: Path) -> None:
    """It was fastest; the fastest real thing leads, and the stand-in is named as one."""
    genuine, threads = Cell(strategy="ddp", devices=2), Cell(strategy="data_parallel", devices=2)
    rows = trial_rows(genuine, [50.0, 51.0]) + trial_rows(
        threads, [99.0, 98.0], stand_in="threads for GPUs"
    )
    html = write_report(stored(tmp_path, rows), tmp_path / "page.html").read_text()
    card = html.split("<h3>Fastest</h3>")[1].split("<h3>Least memory</h3>")[0]
    assert (
        card.index("ddp") < card.index("A stand-in was faster") < card.index("data_<wbr>parallel")
    )


def test_a_heading_names_the_statistic_that_its_column_shows() -> None:
    """The figure is the median over trials; headings called it the mean."""
    from harness.analysis.stats import estimate
    from reports.table import throughput_column

    assert estimate([10.0, 20.0, 90.0]).value == 20.0, "their mean is 40"
    assert throughput_column([]).tip == "median and 95 % interval over trials"
    for file in (Path(__file__).parents[2] / "reports").rglob("*.py"):
        assert "mean over trials" not in file.read_text(), file
