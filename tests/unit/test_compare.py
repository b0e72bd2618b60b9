"""Comparisons of runs, worked out by hand on synthetic frames, without processes."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from harness.analysis.compare import REGRESSIONS, compare_cells, compare_sides
from harness.analysis.ranking import compare
from harness.analysis.selection import measured, select
from harness.analysis.stats import ESTIMATES_COMPARED
from harness.analysis.summary import summarised
from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.record.store import Store
from harness.record.trial import TrialRecord
from tests.unit.compared_runs import CELL, NEW, OLD, OTHER, compared, frames, only, together
from tests.unit.made_results import MIB, diverged_rows, left_out, trial_rows


def test_the_ratio_is_b_over_a() -> None:
    """Geometric means of 100 and 50 give a ratio of 0.5, or 2 if swapped."""
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


@settings(max_examples=8)
@given(one=speeds, two=speeds)
def test_swapping_sides_inverts_the_ratio(one: list[float], two: list[float]) -> None:
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
    line = only(trial_rows(CELL, [100.0]), trial_rows(CELL, [50.0], peak_mib=200.0))
    assert (line.kind, line.memory_verdict) == ("no difference seen", None)


def state(name: str) -> list[dict[str, Any]]:
    """Returns trials of a cell in this state."""
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
        ("ok", "timeout", "newly failing"),
        ("ok", "interrupted", "newly failing"),
        ("ok", "diverged", "newly diverged"),
        ("ok", "refused", "newly unavailable"),
        ("ok", "unverified", "no longer verified"),
        ("unverified", "failed", "newly failing"),
        ("unavailable", "failed", "newly failing"),
        ("failed", "diverged", "newly diverged"),
        ("failed", "unavailable", "newly unavailable"),
        ("", "failed", "added"),
        ("diverged", "ok", "fixed"),
        ("failed", "timeout", "not compared"),
        ("refused", "unavailable", "not compared"),
        ("unverified", "unverified", "not compared"),
        ("diverged", "unverified", "not compared"),
        ("failed", "", "not compared"),
    ],
)
def test_changes_of_a_cell_are_classified(was: str, now: str, kind: str) -> None:
    both = trial_rows(OTHER, [10.0, 10.1])
    found = compared([*state(was), *both], [*state(now), *both])
    (line,) = [line for line in found.lines if line.cell_name == CELL.name]
    assert line.kind == kind
    assert line.regression == (kind in REGRESSIONS)
    assert line.throughput is None
    assert line.reason, "a finding has a reason"


def test_findings_come_first_and_the_headline_counts_them() -> None:
    cells = [Cell(strategy=name) for name in ("a", "b", "c", "d")]
    was = [row for cell in cells[:3] for row in trial_rows(cell, [10.0, 10.0])]
    now = (
        trial_rows(cells[0], [10.0, 10.0])
        + trial_rows(cells[1], [9.0, 9.0])
        + trial_rows(cells[3], [1.0, 1.0])
    )
    found = compared(was, now)
    kinds = ["slower", "missing", "added", "no difference seen"]
    assert [line.kind for line in found.lines] == kinds
    assert "2 regressions: slower 1, missing 1" in found.headline
    assert (found.comparisons, len(found.regressions)) == (4, 2), "throughput and memory of each"


GPU = {"gpus": ["A GPU"], "gpu_memory_bytes": 2**34}


@pytest.mark.parametrize(
    ("device", "was", "now", "different"),
    [
        ("cpu", {}, {"host": "another"}, ""),
        ("cpu", {}, {"memory_bytes": 8 * 2**30 - 2**26}, ""),
        ("cpu", {}, GPU, ""),
        ("cpu", {}, {"cpu_model": "Other CPU"}, "CPU"),
        ("cpu", {}, {"cpu_model": None}, "CPU"),
        ("cpu", {"cpu_model": None}, {"cpu_model": None}, ""),
        ("cpu", {"cpu_model": None}, {"cpu_model": None, "host": "another"}, "hosts"),
        ("cpu", {}, {"cpu_cores": 4}, "number of CPU cores"),
        ("cpu", {}, {"memory_bytes": 2**32}, "memory"),
        ("cuda", {}, GPU, "GPUs"),
        ("cuda", GPU, GPU | {"gpu_memory_bytes": 2**35}, "GPU memory"),
    ],
)
def test_only_equal_hardware_is_compared(
    device: str, was: dict[str, Any], now: dict[str, Any], different: str
) -> None:
    rows = trial_rows(CELL.model_copy(update={"device": device}), [10.0, 10.1])
    one, two = select("old", frames(rows, OLD, **was)), select("new", frames(rows, NEW, **now))
    (line,) = compare_sides(one, two).lines
    assert line.kind == ("not compared" if different else "no difference seen")
    assert bool(line.reason) == bool(different)
    assert line.reason.startswith(f"different {different}" if different else "")
    assert not line.regression


def test_other_software_is_compared_and_reported() -> None:
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
        ([4, 4.01, 4.02], [5.5, 5.51, 5.52], "no difference seen"),
        ([4, 4.01, 4.02], [6.5, 6.51, 6.52], "more memory"),
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


def test_peaks_of_separate_trials_are_all_compared_within_a_run() -> None:
    """The cells have only trial 0 in common, as heats have different members."""
    rows = trial_rows(CELL, [10.0, 10.1, 10.2])
    for row, trial in zip(
        trial_rows(OTHER, [10.0, 10.1, 10.2], peak_mib=120.0), (0, 5, 7), strict=True
    ):
        rows.append(row | {"trial": trial})
    first, second = measured(frames(rows))
    (line,) = compare_cells("run", [(first, second)], ("ddp", "fsdp2")).lines
    assert line.memory_verdict == "more memory"
    assert line.memory is not None
    assert line.memory.ratio == pytest.approx(121 / 101, rel=1e-3)
    assert line.memory.rounds == 3


def test_only_the_last_attempt_counts() -> None:
    now = trial_rows(CELL, [10.0, 10.1])
    stopped = left_out(CELL, "interrupted", "stopped")[0] | {"attempt": 1}
    again = [stopped, *(row | {"attempt": 2} for row in now)]
    assert only(now, again).kind == "no difference seen"


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
    ], "only equal hardware is compared"


def test_nothing_in_common_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="old and new have no cell in common"):
        compared(trial_rows(CELL, [1.0]), trial_rows(OTHER, [1.0]))


def test_cells_of_a_run_are_compared_by_their_estimates() -> None:
    """In a run of an older version that interleaved all trials, each counts as a separate one."""
    rows = []
    for cell, share, began in ((CELL, 1.0, 0.0), (OTHER, 0.97, 1.0)):
        for row in trial_rows(cell, [share * speed for speed in (100.0, 100.1, 99.9)]):
            row["turn_began"] = [began + 2 * turn for turn in range(5)]
            row["turn_samples_per_second"] = [row["samples_per_second"]] * 5
            rows.append(row)
    first, second = measured(frames(rows))
    found = compare_cells("run", [(first, second)], ("ddp", "fsdp2"))
    (line,) = found.lines
    assert line.kind == "slower"
    assert line.throughput is not None
    assert line.throughput.ratio == pytest.approx(0.97)
    assert found.headline == "slower 1"
    assert found.test == ESTIMATES_COMPARED
    assert line.cell_name == f"{OTHER.name} against ddp"
    failed = replace(second, result=replace(second.result, status="failed", reason="the reason"))
    assert (
        compare_cells("run", [(first, failed)], ("ddp", "fsdp2")).lines[0].reason
        == "fsdp2 failed: the reason"
    )


def test_parts_of_one_run_are_hardly_ever_called_different() -> None:
    """The machine's speed drifted between the parts; the common control corrects for it."""
    trials = TrialRecord.from_frame(
        Store(Path(__file__).parents[2] / "results" / "reference").load(steps=False).trials
    )
    verdicts: list[str] = []
    for share in (0.3, 0.5, 0.7):
        cut = sorted(trial.position for trial in trials)[int(share * len(trials))]
        first, rest = (
            {
                cell.cell_id: cell
                for cell in summarised(
                    dataclasses.replace(trial, run_id=name)
                    for trial in trials
                    if (trial.position < cut) == (name == "first")
                )
            }
            for name in ("first", "rest")
        )
        pairs = [
            (rest[name], cell)
            for name, cell in first.items()
            if name in rest and cell.ranked and rest[name].ranked
        ]
        verdicts += [found.verdict for pair in pairs if (found := compare(*pair))]
    assert len(verdicts) > 60
    different = [verdict for verdict in verdicts if verdict != "no difference seen"]
    assert len(different) <= 1
