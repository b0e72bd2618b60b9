"""Report tables: recorded numbers, flags and failures."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from harness.analysis.cell_result import CAUSES
from harness.analysis.summary import cells as summarise
from harness.cell.cell import Cell
from harness.record.store import Results
from reports.text import deviation, number, shortened, shortened_apart, signed, size
from tests.unit.html_page import Page, page_of
from tests.unit.made_results import MIB, stored, trial_rows


def test_every_number_of_the_table_equals_the_frames(results: Results, page: Page) -> None:
    frame = summarise(results.trials).set_index("cell_id")
    assert {f"cell-{cell_id}" for cell_id in frame.index} == set(page.rows)
    compared = 0
    for cell_id, row in frame.iterrows():
        shown = page.rows[f"cell-{cell_id}"]
        for field, value in shown.items():
            expected = row.get(field)
            if field == "step_seconds":
                expected = row["global_batch"] / row["samples_per_second"]
            if expected is None or math.isnan(expected):
                assert value == "", (cell_id, field)
            else:
                assert float(value) == expected, (cell_id, field)
                compared += 1
    assert compared > 100


def test_throughput_has_its_interval(results: Results, page: Page) -> None:
    cell = Cell(strategy="fast", devices=2)
    shown = page.rows[f"cell-{cell.id}"]
    value = float(shown["tokens_per_second"])
    assert value == pytest.approx((70 * 71 * 72) ** (1 / 3) * 64)
    assert float(shown["tokens_per_second_low"]) < value < float(shown["tokens_per_second_high"])
    image = page.rows[
        f"cell-{Cell(strategy='fast', devices=2, data='images', workload='resnet-micro').id}"
    ]
    assert float(image["samples_per_second"]) == pytest.approx((9.0 * 9.1) ** 0.5)


def test_diverged_cells_have_no_place(page: Page) -> None:
    places = {
        name: page.rows[f"cell-{Cell(strategy=name, devices=2).id}"]["place"]
        for name in ("fast", "near", "once", "wrong")
    }
    assert places == {"fast": "1", "near": "2", "once": "", "wrong": ""}


FAILED = {"status": "failed", "reason": "no such file", "samples_per_second": None}


def test_cells_that_fail_alike_share_a_box(tmp_path: Path) -> None:
    cells = [Cell(strategy="broken", devices=2, micro_batches=n) for n in (1, 2, 4)]
    rows = [{**trial_rows(cell, [1.0])[0], **FAILED} for cell in cells]
    rows[-1]["reason"] = "another cause"
    page = page_of(stored(tmp_path, rows), tmp_path)
    boxes = [found for tag, found in page.tags if tag == "div" and found.get("class") == "failure"]
    assert len(boxes) == 2


def test_unknown_is_a_dash_and_never_nan(page: Page) -> None:
    assert "—" in page.text
    shown = [page.text, *(value for _, found in page.tags for value in found.values() if value)]
    assert not [text for text in shown if re.search(r"\b(nan|NaT|None|inf)\b", text)]


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


def test_shortened_labels_keep_what_tells_cells_apart() -> None:
    """A chart showed two bars labelled three_d(data_axis=fsdp2, schedule=…micro_batches=2)."""
    labels = [
        f"three_d(data_axis=fsdp2, schedule={name}, micro_batches=2) x4 fp32"
        for name in ("1f1b", "gpipe")
    ]
    assert shortened_apart([*labels, "ddp x4 fp32"], 52) == [
        "three_d(…1f1b, micro_batches=2) x4 fp32",
        "three_d(…gpipe, micro_batches=2) x4 fp32",
        "ddp x4 fp32",
    ]
    assert shortened_apart([labels[0], labels[0]], 52) == [shortened(labels[0], 52)] * 2
    long = "deepspeed(offload_optimizer=cpu, stage=3) x2 fp32 llama-512x2"
    assert shortened(long, 50) == "deepspeed(offload_o…, stage=3) x2 fp32 llama-512x2"


def test_deviation_and_shortened() -> None:
    assert (deviation(0.0), deviation(None), deviation(1.25e-7)) == ("0", "—", "1.2e-07")
    assert shortened("a" * 60, 20) == "a" * 12 + "…" + "a" * 7
    signs = [signed(value) for value in (0.0104, -0.5, -1e-9, None)]
    assert signs == ["+1.0%", "−50.0%", "+0.0%", "—"]
    sizes = [size(value) for value in (64, 2048, 3.5 * MIB, 2**31, None)]
    assert sizes == ["64 bytes", "2.00 KiB", "3.50 MiB", "2.00 GiB", "—"]


def test_every_number_of_the_small_tables_equals_the_frames(
    sharded_results: Results, sharded_page: Page
) -> None:
    frame = summarise(sharded_results.trials).set_index("cell_id")
    compared = set()
    for cell_id, field, value in sharded_page.grids:
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


def test_nodes_are_shown_if_a_cell_has_several(tmp_path: Path) -> None:
    one, two = (Cell(strategy="spread", devices=4, nodes=n) for n in (1, 2))
    rows = trial_rows(one, [9.0, 9.1, 9.2]) + trial_rows(Cell(strategy="spread"), [4.0, 4.1, 4.2])
    page = page_of(stored(tmp_path / "one", rows), tmp_path)
    assert "nodes" not in page.rows[f"cell-{one.id}"]
    several = stored(tmp_path / "several", rows + trial_rows(two, [7.0, 7.1, 7.2]))
    page = page_of(several, tmp_path)
    assert [page.rows[f"cell-{cell.id}"].get("nodes") for cell in (one, two)] == [None, "2"]


def test_cells_disturbed_by_other_load_are_marked(tmp_path: Path) -> None:
    busy, calm = Cell(strategy="busy", devices=2), Cell(strategy="calm", devices=2)
    rows = trial_rows(calm, [9.0, 9.1])
    page = page_of(stored(tmp_path / "calm", rows), tmp_path)
    assert "¶" not in page.text
    disturbed = trial_rows(busy, [8.0, 8.1, 8.2])
    for row in disturbed[1:]:
        row["foreign_load_cores"] = 0.5
    page = page_of(stored(tmp_path / "busy", rows + disturbed), tmp_path)
    assert re.search("busy ?¶", page.text)
    assert not re.search("calm ?¶", page.text)
    assert f"{CAUSES['busy']} 2 of 3 trials" in page.text
