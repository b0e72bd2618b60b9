"""Which cells are compared, and with which baseline: repeated trials, trials per round, heats."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.planning import kept_or_new_plan
from bench.run_options import CommandOptions
from bench.select import baseline_choice
from harness.cell.cell import Cell
from harness.record.plan import Plan
from harness.record.store import Store
from harness.record.trial import TrialRecord
from harness.run.allocation import not_compared, planned_headline, worth_launching
from tests.unit.stored_trials import trial_row

STRATEGIES = ("ddp", "fsdp1", "fsdp2", "zero_redundancy", "collectives")
"""The first is the default baseline."""
CELLS = [Cell(strategy=name, devices=2, workload="llama-nano") for name in STRATEGIES]


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fewer, cells of two devices are not compared."""
    monkeypatch.setattr("harness.host.cores.allowed_cores", lambda: [0, 1])


def matrix_of(folder: Path, *axes: str) -> str:
    path = folder / "m.yaml"
    names = ", ".join(STRATEGIES)
    cells = ", ".join(["devices: 2", "workload: llama-nano", *axes])
    path.write_text(f"timed_seconds: 1\ntrials: 2\ncells: [{{strategy: [{names}], {cells}}}]\n")
    return str(path)


@pytest.mark.parametrize(
    "without_plain_cells", [{"recompute": "full"}, {"micro_batches": 2}, {"compile": "block"}]
)
def test_cells_of_a_setting_are_compared_also_without_a_baseline(
    without_plain_cells: dict[str, object],
) -> None:
    several = [cell.model_copy(update=without_plain_cells) for cell in CELLS]
    alone = several[0].model_copy(update={"global_batch": 16})
    diverging = several[1].model_copy(update={"global_batch": 16, "expect": "diverged"})
    assert not_compared([*several, alone, diverging], 2) == {alone.id, diverging.id}
    assert not_compared([*several, alone], 1) == {cell.id for cell in (*several, alone)}, (
        "they have more ranks than cores"
    )


def test_a_plan_without_a_baseline_repeats_and_races(tmp_path: Path) -> None:
    options = CommandOptions(matrix=matrix_of(tmp_path), settings={"recompute": "full"})
    plan, _ = kept_or_new_plan(Store(tmp_path), options)
    assert {plan.trials_of(cell) for cell in plan.cells} == {2}
    assert {plan.timed_seconds_of(cell) for cell in plan.cells} == {1.0}
    trials = [
        TrialRecord(**trial_row(cell, trial, samples_per_second=10.0 + trial / 10))
        for cell in plan.cells
        for trial in range(2)
    ]
    (heat,) = worth_launching(plan, trials)
    assert 1 < len(heat) <= len(plan.cells)


@pytest.mark.parametrize(("pattern", "expected"), [("", "ddp"), ("fsdp2", "fsdp2")])
def test_the_chosen_baseline_gets_more_trials_per_round_and_is_in_each_heat(
    tmp_path: Path, pattern: str, expected: str
) -> None:
    options = CommandOptions(matrix=matrix_of(tmp_path), baseline=pattern)
    plan, _ = kept_or_new_plan(Store(tmp_path), options)
    counts = {cell.strategy: plan.launches_per_round.get(cell.id, 1) for cell in plan.cells}
    assert counts == dict.fromkeys(STRATEGIES, 1) | {expected: 2}
    choice = baseline_choice(pattern, plan.cells)
    headline = planned_headline(plan, 2, choice)
    assert headline is not None
    _, baseline = headline
    assert baseline is not None
    assert baseline.strategy == expected
    trials = [
        TrialRecord(**trial_row(cell, wraps_ddp="torchrun" if cell.strategy == "ddp" else None))
        for cell in CELLS
    ]
    heats = worth_launching(
        Plan("run-1", "test", (*CELLS,), 1, until_answered=True), trials, choice
    )
    assert len(heats) == 2
    chosen = next(cell.id for cell in CELLS if cell.strategy == expected)
    assert all(chosen in heat for heat in heats)
