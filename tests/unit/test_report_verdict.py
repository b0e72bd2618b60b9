"""The report's verdict: which cells are compared, and which of them leads."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.analysis.summary import cell_results
from harness.cell.cell import Cell
from harness.record.store import Results
from reports.groups import find_groups, headline, pareto
from reports.run_report import ran
from reports.run_sections import run_text
from reports.speed_sections import memory_scatter, scaling, throughput_bars
from reports.time_sections import bubble_theory
from tests.unit.html_page import Page, page_of
from tests.unit.made_results import diverged_rows, stored, trial_rows

FASTEST = ("a", "Fastest, Least memory")


def figures_of(results: Results) -> list[tuple[str, str]]:
    """Returns strategy and role in each line of the verdict's table."""
    text = run_text(ran(results), ["verdict"]).text
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [(line[0], line[1]) for line in lines[1:]]


def bars_of(results: Results) -> dict[str, bool]:
    """Returns whether bars of the throughput chart are highlighted, by label."""
    leading = ran(results).leading
    assert leading is not None
    return {bar.label: bar.strong for bar in throughput_bars(leading, "x").bars}


def test_verdict_names_the_fastest_and_the_most_frugal(results: Results, page: Page) -> None:
    assert figures_of(results)[:2] == [
        ("fast", "Use"),
        ("small(micro\\_batches=4)", "Least memory"),
    ]
    verdict = page.text[: page.text.index("Throughput (higher")]
    for words in ("4,544", "52.0", "7 of 9 cells", "2 cells diverged", "1 of them as expected"):
        assert words in verdict


def test_headline_is_a_comparison_and_says_where_there_is_none(tmp_path: Path) -> None:
    rows = trial_rows(Cell(strategy="a"), [2.0, 2.1]) + trial_rows(Cell(strategy="b"), [1.0, 1.1])
    rows += trial_rows(Cell(strategy="a", devices=2), [3.0, 3.1])
    page = page_of(stored(tmp_path / "two", rows), tmp_path)
    assert (
        "on 1 device · fp32 · batch 8 of 64 tokens · 1 core per device, where nothing is"
        " communicated" in page.text
    )
    assert "Nothing to compare" not in page.text
    alone = page_of(stored(tmp_path / "one", rows[:2]), tmp_path)
    assert "Nothing to compare" in alone.text


@pytest.mark.parametrize("verdict", ["exact", "within tolerance"])
def test_a_fastest_cell_that_trains_another_way_says_so(tmp_path: Path, verdict: str) -> None:
    """It leads only if no cell trains exactly the same, as in bf16."""
    other, same = (Cell(strategy=name, devices=2) for name in "ab")
    rows = trial_rows(other, [2.0, 2.1], parity_verdict="within tolerance")
    rows += trial_rows(same, [1.0, 1.1], parity_verdict=verdict)
    results = stored(tmp_path, rows)
    assert figures_of(results)[0] == (("b", "Use, Least memory") if verdict == "exact" else FASTEST)
    assert set(bars_of(results)) == {"a*", "b" if verdict == "exact" else "b*"}


def test_run_where_nothing_passed_says_so(tmp_path: Path) -> None:
    page = page_of(stored(tmp_path, diverged_rows(Cell(strategy="wrong"))), tmp_path)
    assert "nothing is ranked" in page.text


def test_figure_data_by_hand(results: Results) -> None:
    cells = cell_results(results.trials)
    group = headline(find_groups(cells))
    assert group is not None
    assert [row.cell.label for row in group.rows] == [
        "fast",
        "near",
        "small(micro_batches=4)",
        "once",
    ]
    assert [row.cell.label for row in pareto(group)] == ["fast", "near", "small(micro_batches=4)"]
    bars = throughput_bars(group, "x").bars
    assert [bar.strong for bar in bars] == [True, True, False, False]
    assert bars[3].label == "once†"
    assert bars[3].low is not None
    assert bars[3].high is not None
    assert bars[3].low < bars[3].value < bars[3].high
    (strong,) = scaling(cells, "strong")
    alone = (40 * 41 * 40.5) ** (1 / 3) * 64
    assert [devices for devices, _ in strong.ideal] == [1, 2]
    assert [rate for _, rate in strong.ideal] == pytest.approx([alone, 2 * alone])
    assert bubble_theory(2, 4) == pytest.approx(1 / 5)


@pytest.mark.parametrize("regime", ["strong", "weak"])
def test_a_curve_joins_micro_batches_of_equal_size(tmp_path: Path, regime: str) -> None:
    """GPUs hold micro-batches of a fixed size, so strong scaling needs fewer on more devices; with
    tensor parallelism, weak scaling needs more."""
    rows = []
    for devices in (1, 2, 4):
        parts, batch, ranks = (
            (8 // devices, 64, devices) if regime == "strong" else (devices, 8 * devices, 1)
        )
        for strategy, options, number in (
            ("fit", {"a": 1}, parts),
            ("fixed", {}, 8),
            ("both", {}, parts),
            *([("both", {}, 8)] if parts != 8 else []),
        ):
            cell = Cell(
                strategy=strategy,
                options=options,
                device="cuda",
                devices=devices,
                regime=regime,
                global_batch=batch,
                micro_batches=number,
            )
            on_gpus = {"data_parallel": ranks, "oversubscribed": False}
            rows += trial_rows(cell, [10.0 * devices, 10.1 * devices], **on_gpus)
    (curves,) = scaling(cell_results(stored(tmp_path, rows).trials), regime)
    assert {line.label: line.x for line in curves.lines} == {
        "fit(a=1) · micro-batches of 8 samples": (1, 2, 4),
        "fixed(micro_batches=8)": (1, 2, 4),
        "both · micro-batches of 8 samples": (1, 2, 4),
        "both(micro_batches=8)": (1, 2, 4),
    }


def test_cells_on_a_curve_of_equal_micro_batches_make_no_further_curve(tmp_path: Path) -> None:
    rows = [
        row
        for devices in (1, 2, 4)
        for parts in (1, 4)
        for row in trial_rows(
            Cell(strategy="a", devices=devices, global_batch=16, micro_batches=parts),
            [10.0],
            oversubscribed=False,
        )
    ]
    (curves,) = scaling(cell_results(stored(tmp_path, rows).trials), "strong")
    assert sorted(line.label for line in curves.lines) == ["a", "a(micro_batches=4)"]


def test_points_of_stand_ins_are_called_hollow(tmp_path: Path) -> None:
    rows = [
        row
        for name in "abc"
        for row in trial_rows(Cell(strategy=name), [8.0], stand_in="threads for GPUs")
    ]
    (group,) = find_groups(cell_results(stored(tmp_path, rows).trials))
    scatter = memory_scatter(group, "x")
    assert scatter is not None
    assert scatter.notes == ("† hollow: a stand-in ran instead of the real thing",)


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        ((True, True), "2 cells diverged, as expected, and are not ranked."),
        ((True, False), "2 cells diverged and are not ranked, 1 of them as expected."),
        ((False, False), "2 cells diverged and are not ranked."),
    ],
)
def test_expected_divergence_is_counted(
    tmp_path: Path, expected: tuple[bool, bool], words: str
) -> None:
    rows = trial_rows(Cell(strategy="a"), [8.0])
    for name, planned in zip("bc", expected, strict=True):
        cell = Cell(strategy=name, expect="diverged" if planned else "ok")
        rows += diverged_rows(cell, expected=planned)
    assert words in run_text(ran(stored(tmp_path, rows)), ["verdict"]).text


def test_a_cell_with_more_ranks_than_cores_neither_leads_nor_hides_its_group(
    tmp_path: Path,
) -> None:
    """A parameter server adds a rank to the devices' ranks. Its group stays in the verdict, led by
    another cell."""
    rows = trial_rows(Cell(strategy="a", devices=2), [50.0, 51.0]) + trial_rows(
        Cell(strategy="b", devices=2), [40.0, 41.0]
    )
    rows += trial_rows(
        Cell(strategy="served", devices=2), [90.0, 91.0], peak_mib=50, oversubscribed=True
    )
    rows += trial_rows(Cell(strategy="a"), [30.0, 31.0]) + trial_rows(
        Cell(strategy="b"), [30.0, 31.0]
    )
    results = stored(tmp_path, rows)
    assert figures_of(results) == [("a", "Use, Least memory")]
    assert bars_of(results) == {"served‡": False, "a": True, "b": False}


def test_a_stand_in_does_not_lead_the_verdict(tmp_path: Path) -> None:
    genuine, threads = Cell(strategy="ddp", devices=2), Cell(strategy="data_parallel", devices=2)
    rows = trial_rows(genuine, [50.0, 51.0]) + trial_rows(
        threads, [99.0, 98.0], stand_in="threads for GPUs"
    )
    results = stored(tmp_path, rows)
    assert figures_of(results) == [("ddp", "Fastest, Least memory")]
    assert bars_of(results) == {"data_parallel†": False, "ddp": True}


def test_one_trial_per_cell_gets_no_advice(tmp_path: Path) -> None:
    rows = trial_rows(Cell(strategy="ddp", devices=2), [50.0])
    rows += trial_rows(Cell(strategy="fsdp2", devices=2), [40.0])
    results = stored(tmp_path, rows)
    assert figures_of(results) == [("ddp", "Fastest, Least memory")]
    assert "one trial per cell" in run_text(ran(results), ["verdict"]).text
