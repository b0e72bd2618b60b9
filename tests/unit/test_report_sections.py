"""The sections on systems, states, memory, traffic, wrappers, variants and the largest model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from harness.analysis.setting import systems
from harness.analysis.summary import cell_results
from harness.cell.cell import Cell
from harness.record.store import Results
from reports import blocks as ui
from reports import memory_sections, time_sections
from reports.blocks import plain_text, spans
from reports.cells_sections import left_out, not_run, system_status, systems_blocks
from reports.comparison_sections import (
    launcher_bars,
    launcher_table,
    launchers,
    variants,
    variants_bars,
    variants_table,
)
from reports.parity_sections import tolerances
from reports.run_report import all_systems, ran
from reports.text import DASH
from tests.unit.html_page import Page, page_of
from tests.unit.made_results import BUCKETS, MIB, rows_of, searched, stored, trial_rows


def test_systems_that_are_not_on_this_host_come_first(
    sharded_results: Results, sharded_page: Page
) -> None:
    rows = list(rows_of(sharded_results).values())
    by_number = ["3 wrapped", "6 Rare", "10 disks", "21 adapters"]
    assert [one.name for one in systems(rows)] == by_number
    later = Cell(strategy="late", system="30 later")
    missing = not_run(all_systems(rows, [later]))
    (absent,), (later_one,), (part,) = missing["absent"], missing["none"], missing["part"]
    assert (absent.name, len(absent.cells)) == ("6 Rare", 3)
    assert {what: len(names) for (what, _), names in left_out(absent).items()} == {
        "not available here": 2,
        "cannot exist": 1,
    }
    assert (part.name, len(part.cells), part.count("ok")) == ("10 disks", 2, 1)
    assert later_one.name == "30 later"
    assert len(left_out(later_one)) == 1
    for reason in ("pip install rare", "there is no disk: mount one"):
        assert reason in sharded_page.text


def test_overview_of_systems(sharded_results: Results) -> None:
    report = ran(sharded_results)
    _, table, _ = systems_blocks(report)
    assert isinstance(table, ui.Table)
    wrapped, rare, disks, adapters = (
        [plain_text(td.text) for td in row.cells] for row in table.rows
    )
    assert (wrapped[1], wrapped[4]) == ("2 / 2", "2 exact")
    assert (rare[1], rare[2], rare[4]) == ("0 / 3", DASH, DASH)
    assert disks[0].startswith("ran in part")
    assert adapters[1] == "1 / 1"
    halted = [
        dataclasses.replace(cell, status="interrupted")
        if cell.cell.system == "3 wrapped" and cell.cell.label != "plain"
        else cell
        for cell in report.cells
    ]
    assert system_status(systems(halted)[0])[1] == "ran in part"
    plain = tuple(cell.varied(system="") for cell in report.cells)
    assert systems_blocks(dataclasses.replace(report, cells=plain)) == []


def test_states_against_the_formula(sharded_results: Results) -> None:
    rows = rows_of(sharded_results)
    (chart,) = memory_sections.state_charts(ran(sharded_results))
    sharded_, plain, wrapped = chart.bars
    of_fullest_rank = ("sharded", (2.0, 0.0, 4.0, 0.0), 7.0, True)
    assert (sharded_.label, sharded_.parts, sharded_.target, sharded_.failed) == of_fullest_rank
    assert {plain.label, wrapped.label} == {"plain", "wrap"}
    as_by_formula = ((4.0, 0.0, 8.0, 4.0), 16.0, 102.0, False)
    assert (plain.parts, plain.target, plain.peak, plain.failed) == as_by_formula
    buffers = {
        plain_text(row.head): plain_text(row.cells[0].text)
        for row in memory_sections.buffers_table(list(rows.values())).rows
    }
    keepers = buffers[f"{BUCKETS}: 4.00 MiB; 1 smaller one: 8 bytes"]
    assert keepers == "plain x2 llama-mini, wrap x2 llama-mini"
    wrap = rows["wrap llama-mini"]
    much = dataclasses.replace(wrap.states, library_bytes=2000 * MIB, state_bytes=2012 * MIB)
    far = dataclasses.replace(wrap, states=much)
    rest = [rows["plain llama-mini"], rows["sharded llama-mini"]]
    stacked = memory_sections.state_stacks([far, *rest], "x", "title", lambda cell: cell.cell.label)
    assert stacked.limit is not None
    assert stacked.limit < 200
    assert stacked.bars[-1].value == 2012
    assert stacked.notes


def test_uneven_memory_by_rank(sharded_results: Results) -> None:
    (chart,) = memory_sections.rank_bars(ran(sharded_results))
    (bar,) = chart.bars
    assert (bar.label, bar.text) == ("sharded x2 fp32", "1.33 · 100 MiB")
    assert bar.dots == pytest.approx((100 / 75 * 100, 50 / 75 * 100))


def test_traffic_against_the_ring(sharded_results: Results) -> None:
    rows = rows_of(sharded_results)
    report = ran(sharded_results)
    (chart,) = time_sections.traffic_bars(report)
    assert [(bar.label, bar.value, bar.target, bar.strong) for bar in chart.bars] == [
        ("plain", 1.0, 1.0, True),
        ("wrap", 1.0, 1.0, True),
        ("sharded", 1.5, 1.0, False),
    ]
    assert time_sections.sent(rows["plain llama-mini+nf4+lora"]) == 1.0, (
        "an eighth is trained, and sent"
    )
    plain = rows["plain llama-mini"].varied(devices=4)
    all_data, half_data = (
        dataclasses.replace(plain, placement=dataclasses.replace(plain.placement, data_parallel=n))
        for n in (4, 2)
    )
    assert time_sections.bound(all_data) == 1.5
    assert time_sections.bound(half_data) is None, "a rank does not have the whole model"
    assert time_sections.bounds_in_words(list(rows.values())) == "1.00 x for 2 ranks"
    disk = time_sections.OFFLOAD.table(report)
    (line,) = disk.rows
    shown = {span.field: span.text for td in line.cells for span in spans(td.text)[:1]}
    assert shown["offload_read_bytes_per_step"] == "3.00 MiB"
    assert shown["offload_kept_bytes"] == "7.00 MiB"
    assert shown["state_bytes"] == "6.00 MiB"


def test_wrappers_cost(sharded_results: Results) -> None:
    (one,) = launchers(list(rows_of(sharded_results).values()))
    assert [bar.label for bar in launcher_bars(*one, "x").bars] == ["torchrun", "Wrapper"]
    fast, slow = (
        {span.field: span.value for td in line.cells for span in spans(td.text)}
        for line in launcher_table(*one, "x").rows
    )
    assert (fast["step_ratio"], fast["extra_seconds"]) == ("1", "0")
    assert float(slow["step_ratio"]) == pytest.approx(1.25, rel=1e-3)
    assert float(slow["extra_seconds"]) == pytest.approx(8 / 40 - 8 / 50, rel=1e-2)


def test_wrapper_groups_of_the_same_setting_have_different_titles(tmp_path: Path) -> None:
    rows = [
        row
        for parts in (1, 4)
        for name in ("ddp", "horovod")
        for row in trial_rows(
            Cell(strategy=name, devices=2, micro_batches=parts), [8.0, 8.1], wraps_ddp=name
        )
    ]
    titles = [title for title, _ in launchers(cell_results(stored(tmp_path, rows).trials))]
    plain = "llama-mini · 2 devices · fp32 · batch 8"
    assert sorted(titles) == [plain, f"{plain} · micro_batches=4"]


def test_tolerances_that_differ_in_updates_share_a_row(tmp_path: Path) -> None:
    cells = {"a": 1e-4, "b": 4e-4, "c": 4e-4}
    near = {"parity_verdict": "within tolerance", "parity_reason": "why"}
    rows = []
    for name, update in cells.items():
        more = near if name == "c" else {}
        rows += trial_rows(Cell(strategy=name), [8.0], parity_update_tolerance=update, **more)
    rows += trial_rows(Cell(strategy="d", precision="bf16"), [8.0], parity_loss_tolerance=1e-3)
    found = tolerances(cell_results(stored(tmp_path, rows).trials))
    assert found == [
        ("1.0e-05", "1.0e-04", "", ("a fp32",)),
        ("1.0e-05", "4.0e-04", "why", ("b fp32", "c fp32")),
        ("1.0e-03", "1.0e-03", "", ("d bf16",)),
    ]
    (one, _) = tolerances(
        [c for c in cell_results(stored(tmp_path, rows).trials) if c.cell.label != "c"]
    )
    assert one == ("1.0e-05", "1.0e-04 to 4.0e-04", "", ("a fp32", "b fp32"))


def test_variants_next_to_their_model(sharded_results: Results) -> None:
    (cells,) = variants(list(rows_of(sharded_results).values()))
    table, bars = variants_table(cells, "x"), variants_bars(cells, "x")
    heads = [plain_text(line.head) for line in table.rows]
    assert heads == ["llama-mini", "llama-mini+nf4+lora"]
    titles = [column.title for column in table.columns]
    texts = {
        title: spans(td.text)[0].text for title, td in zip(titles, table.rows[1].cells, strict=True)
    }
    columns = ("Trained", "Of all", "Optimizer", "Distance to fp32")
    assert [texts[column] for column in columns] == ["131,072", "12%", "1.00 MiB", "3.0e-03"]
    assert bars is not None
    assert [bar.label for bar in bars.bars] == ["llama-mini+nf4+lora", "llama-mini"]


def test_largest_trainable_model(tmp_path: Path) -> None:
    page = page_of(searched(tmp_path), tmp_path)
    assert page.headings[:4] == ["verdict", "largest", "claims", "states"]
    assert "contrary to theory" in page.text
    shown: dict[str, list[str]] = {}
    for _, field, value in page.grids:
        shown.setdefault(field, []).append(value)
    assert (shown["parameters"], shown["next_parameters"], shown["ratio"]) == (
        ["30", "20"],
        ["40", "30"],
        ["0.75", "0.5"],
    )
    rows = [found for tag, found in page.tags if tag == "tr"]
    cells = [found for found in rows if str(found.get("id")).startswith("cell-")]
    assert len(cells) == 2, "probes are not cells"
    assert "failures" not in page.headings, "a probe that does not fit is not a failure"
