"""The report's verdict: which cells are compared, and which of them leads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.analysis.summary import cell_results
from harness.cell.cell import Cell
from harness.record.store import Results
from harness.run.metrics import command_line
from reports.groups import find_groups, headline, pareto
from reports.names import NOT_RANKED
from reports.run_report import ran
from reports.run_sections import run_text
from reports.speed_sections import scaling, throughput_bars
from tests.unit.made_results import stored, trial_rows

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


def test_verdict_names_the_fastest_and_the_most_frugal(results: Results) -> None:
    assert figures_of(results)[:2] == [
        ("fast", "Use"),
        ("small(micro\\_batches=4)", "Least memory"),
    ]


@pytest.mark.parametrize("verdict", ["exact", "within tolerance"])
def test_a_fastest_cell_that_trains_another_way_says_so(tmp_path: Path, verdict: str) -> None:
    """It leads only if no cell trains exactly the same, as in bf16."""
    other, same = (Cell(strategy=name, devices=2) for name in "ab")
    rows = trial_rows(other, [2.0, 2.1], parity_verdict="within tolerance")
    rows += trial_rows(same, [1.0, 1.1], parity_verdict=verdict)
    results = stored(tmp_path, rows)
    assert figures_of(results)[0] == (("b", "Use, Least memory") if verdict == "exact" else FASTEST)
    assert set(bars_of(results)) == {"a*", "b" if verdict == "exact" else "b*"}


def test_figure_data_by_hand(results: Results) -> None:
    cells = cell_results(results.trials)
    group = headline(find_groups(cells))
    assert group is not None
    ranked = ["fast", "near", "small(micro_batches=4)", "once"]
    assert [row.cell.label for row in group.rows] == ranked
    assert [row.cell.label for row in pareto(group)] == ranked[:3]
    bars = throughput_bars(group, "x").bars
    assert [bar.strong for bar in bars] == [True, True, False, False, False]
    assert [bar.label for bar in bars[3:]] == [NOT_RANKED, "once†"]
    assert bars[4].low is not None
    assert bars[4].high is not None
    assert bars[4].low < bars[4].value < bars[4].high
    (strong,) = scaling(cells, "strong")
    alone = (40 * 41 * 40.5) ** (1 / 3) * 64
    assert [devices for devices, _ in strong.ideal] == [1, 2]
    assert [rate for _, rate in strong.ideal] == pytest.approx([alone, 2 * alone])


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


@pytest.mark.parametrize(
    ("of_fastest", "mark"),
    [({"stand_in": "threads for GPUs"}, "†"), ({"oversubscribed": True, "peak_mib": 50}, "‡")],
)
def test_a_stand_in_or_too_many_ranks_neither_leads_nor_hides_its_group(
    tmp_path: Path, of_fastest: dict[str, Any], mark: str
) -> None:
    """A parameter server adds a rank to the devices' ranks, for which there may be no core."""
    rows = trial_rows(Cell(strategy="a", devices=2), [50.0, 51.0])
    rows += trial_rows(Cell(strategy="b", devices=2), [40.0, 41.0])
    rows += trial_rows(Cell(strategy="fastest", devices=2), [90.0, 91.0], **of_fastest)
    rows += trial_rows(Cell(strategy="a"), [30.0, 31.0]) + trial_rows(
        Cell(strategy="b"), [30.0, 31.0]
    )
    results = stored(tmp_path, rows)
    assert figures_of(results) == [("a", "Use, Least memory")]
    ordered = ["a", "b", NOT_RANKED, f"fastest{mark}"]
    assert list(bars_of(results).items()) == [(name, name == "a") for name in ordered]


def test_one_trial_per_cell_gets_no_advice(tmp_path: Path) -> None:
    rows = trial_rows(Cell(strategy="ddp", devices=2), [50.0])
    rows += trial_rows(Cell(strategy="fsdp2", devices=2), [40.0])
    assert figures_of(stored(tmp_path, rows)) == [("ddp", "Fastest, Least memory")]


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("python -m bench run --matrix 'my file.yaml' --set batch=16", True),
        ("python -m bench run --matrix smoke; rm -r x", False),
        ("python -m bench run --matrix 'open", False),
        ("curl x", False),
        (None, False),
    ],
)
def test_the_command_to_repeat_is_the_recorded_one_if_it_is_only_that(
    tmp_path: Path, command: str | None, shown: bool
) -> None:
    """Results may be another person's, and a page's commands are made to be pasted in a shell."""
    rows = trial_rows(Cell(strategy="a", devices=2), [1.0, 1.1])
    results = stored(tmp_path, rows, command=command, matrix="mine")
    text = run_text(ran(results), ["verdict"]).text
    assert (command or "never") in text if shown else "python -m bench run --matrix mine" in text
    assert "rm -r" not in text


def test_a_run_records_the_command_that_started_it() -> None:
    typed = ["--matrix", "my file.yaml", "--set", "env=HF_TOKEN=abcdef"]
    assert command_line("/x/bench/__main__.py", "run", *typed[:2]) == (
        "python -m bench run --matrix 'my file.yaml'"
    )
    assert "abcdef" not in str(command_line("/bin/parallelism-bench", "run", *typed))
    assert command_line("train.py", "run") is None


def test_a_model_too_small_to_share_says_that_one_device_is_faster(tmp_path: Path) -> None:
    rows = trial_rows(Cell(strategy="single", devices=1), [6.0, 6.01, 6.0])
    for strategy, speed in (("ddp", 2.0), ("horovod", 1.0)):
        rows += trial_rows(Cell(strategy=strategy, devices=2), [speed, speed + 0.01, speed])
    text = run_text(ran(stored(tmp_path, rows)), ["verdict"]).text
    assert "one device alone is 3 times as fast as ddp: this model is too small to share" in text
