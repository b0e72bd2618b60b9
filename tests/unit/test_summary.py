"""Summary of a cell's trials: place, status and disturbances."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.selection import measured
from harness.analysis.summary import cell_results, cells
from harness.cell.cell import Cell
from harness.record.run_record import RunRecord
from harness.record.store import Store
from harness.record.trial import TrialRecord
from tests.unit.stored_trials import frame_of, one_cell_run, trial_row


def test_the_summary_ranks_only_what_passed_parity() -> None:
    single, ddp, bad = (
        Cell(strategy="single"),
        Cell(strategy="ddp", devices=2),
        Cell(strategy="fsdp2", devices=2),
    )
    rows = [
        trial_row(single, 0, samples_per_second=10.0),
        trial_row(single, 1, samples_per_second=14.0),
        trial_row(ddp, 0, samples_per_second=16.0),
        trial_row(ddp, 1, samples_per_second=17.0),
        trial_row(bad, 0, samples_per_second=99.0, status="diverged", parity_verdict="diverged"),
        trial_row(bad, 1, samples_per_second=99.0),
    ]
    table = cells(frame_of(rows))
    assert list(table["strategy"]) == ["ddp", "single", "fsdp2"]
    assert list(table["ranked"]) == [True, True, False]
    means = [math.sqrt(16 * 17), math.sqrt(10 * 14)]  # geometric
    assert table["samples_per_second"].tolist()[:2] == pytest.approx(means)
    assert table.loc[0, "efficiency_single"] == pytest.approx(means[0] / means[1] / 2)
    places = table["place"].tolist()
    assert places[:2] == [1, 1], "another number of devices is another setting"
    assert math.isnan(places[2])


def test_scaling_is_from_as_large_micro_batches_if_none_are_as_many() -> None:
    rows = [
        trial_row(
            Cell(strategy=strategy, devices=devices, global_batch=64, micro_batches=parts),
            0,
            samples_per_second=speed,
            data_parallel=devices,
        )
        for strategy, devices, parts, speed in (
            ("single", 1, 8, 10.0),
            ("ddp", 1, 4, 1.0),
            ("ddp", 1, 8, 8.0),
            ("ddp", 2, 4, 16.0),
            ("ddp", 8, 1, 40.0),
            ("ddp", 8, 2, 99.0),
        )
    ]
    found = {
        (cell.cell.devices, cell.cell.micro_batches): (
            cell.relative.efficiency_own,
            cell.relative.efficiency_single,
        )
        for cell in cell_results(frame_of(rows))
        if cell.cell.devices > 1
    }
    assert found == {
        (2, 4): pytest.approx((8.0, 0.8)),
        (8, 1): pytest.approx((0.625, 0.5)),
        (8, 2): (None, None),
    }, "as many micro-batches come first"


def test_parity_is_that_of_the_trial_that_deviates_most() -> None:
    one = Cell(strategy="single")
    verdicts = [("exact", 3e-3), ("within tolerance", 1e-4), ("within tolerance", 2e-3)]
    rows = [
        trial_row(one, trial, parity_verdict=verdict, parity_max_loss_deviation=deviation)
        for trial, (verdict, deviation) in enumerate(verdicts)
    ]
    (cell,) = cell_results(frame_of(rows))
    assert (cell.parity.verdict, cell.parity.max_loss_deviation) == ("within tolerance", 2e-3)


def test_a_trial_that_the_user_stopped_does_not_take_the_others_place() -> None:
    def row(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return dict(cells(frame_of(rows)).loc[0])

    one = Cell(strategy="single")
    stopped = {
        "status": "interrupted",
        "reason": "stopped by the user",
        "samples_per_second": None,
        "parity_verdict": None,
    }
    part = row(
        [
            trial_row(one, 0, samples_per_second=10.0),
            trial_row(one, 1, samples_per_second=14.0),
            trial_row(one, 2, **stopped),
        ]
    )
    assert (part["status"], part["ranked"], part["trials"]) == ("ok", True, 2)
    assert part["samples_per_second"] == pytest.approx(math.sqrt(10 * 14))
    failed = row([trial_row(one, 0, status="failed"), trial_row(one, 1, **stopped)])
    assert (failed["status"], failed["ranked"]) == ("failed", False)
    none = row([trial_row(one, trial, **stopped) for trial in (0, 1)])
    assert (none["status"], none["ranked"], none["trials"]) == ("interrupted", False, 0)


@pytest.mark.parametrize(
    "statuses",
    [("diverged", "failed"), ("failed", "diverged"), ("ok", "diverged", "failed"), ("ok", "ok")],
)
def test_a_cell_has_one_status_in_reports_and_in_comparisons(
    tmp_path: Path, statuses: tuple[str, ...]
) -> None:
    store = Store(tmp_path)
    store.write_run(RunRecord(**one_cell_run()))
    for number, status in enumerate(statuses):
        figures = {"status": status, "reason": "" if status == "ok" else f"it {status}"}
        store.write_trial(TrialRecord(**trial_row(Cell(strategy="ddp"), number, **figures)))
    loaded = store.load(steps=False)
    [of_report], [of_comparison] = cells(loaded.trials).to_dict("records"), measured(loaded)
    assert (of_report["status"], of_report["reason"]) == (
        of_comparison.result.outcome,
        of_comparison.result.outcome_reason,
    )
    assert of_report["status"] == ("failed" if "failed" in statuses else "ok"), (
        "the worst of its trials"
    )
    assert of_report["reason"] == (
        f"1 of {len(statuses)} trials: it failed" if "failed" in statuses else ""
    )


def test_trials_disturbed_by_other_load_are_counted() -> None:
    quiet = {"foreign_load_cores": 0.1, "idle_before": 1.0, "idle_after": 0.95}
    one = Cell(strategy="single")
    rows = [
        trial_row(one, 0, **quiet),
        trial_row(one, 1, **quiet | {"foreign_load_cores": 0.6}),
        trial_row(one, 2, **quiet | {"idle_after": 0.5}),
        trial_row(one, 3),
    ]
    assert cells(frame_of(rows)).loc[0, "disturbed"] == 2
