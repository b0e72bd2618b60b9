"""Steps that the suite adds: time limits, expected durations and the time budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.cell.cell import Cell
from harness.cell.durable import write_cached
from harness.parity.reference import Reference
from harness.parity.reference_runs import reference_key
from harness.record.plan import Plan
from harness.record.run_record import RunRecord
from harness.record.store import Store, TrialKey
from harness.record.trial import TrialRecord
from harness.run.allocation import TimeBudget
from harness.run.prepared import PreparedTrial
from harness.run.runner import HEAT_SECONDS, ProgressListener, Runner
from harness.seam.job import TrainState
from harness.seam.registry import make_strategy
from harness.worker.rewind import Rewinds
from tests.unit.stored_trials import one_cell_run, trial_row

CELL = Cell(strategy="ddp", workload="llama-nano", devices=2)
OTHER = CELL.model_copy(update={"strategy": "fsdp2"})
TURNS = {"turn_samples_per_second": (8.0,) * 6, "turn_began": (0.0,) * 6}


def limit_of(cell: Cell, **more: Any) -> float:
    """Returns a trial's time limit in seconds."""
    prepared = PreparedTrial(cell, TrialKey(cell.id, 3), 0, more.pop("reference", None), **more)
    assert prepared.cell.time_limit_seconds == cell.time_limit_seconds, "as recorded"
    return prepared.launch.cell.time_limit_seconds


def test_steps_that_the_suite_adds_extend_the_time_limit() -> None:
    """A heat of 12 timed steps has 21: 3 of warm-up and 6 that settle."""
    assert limit_of(CELL) == 120
    assert limit_of(CELL, timed_seconds=2.6) == 123
    assert limit_of(CELL, timed_steps=12) == pytest.approx(120 * 21 / 13, abs=1)
    assert limit_of(CELL, timed_steps=10) == pytest.approx(120 * 18 / 13, abs=1)
    for unchanged in (
        Cell(strategy="ddp", workload="llama-nano", devices=2, checkpoint="full"),
        Cell(strategy="ddp", workload="llama-nano", devices=2, nodes=2),
    ):
        assert limit_of(unchanged, timed_seconds=2.6) == 120, "it has no control"


@pytest.mark.parametrize("more", [{}, {"device": "cuda"}, {"strategy": "post_local_sgd"}])
def test_replays_extend_the_time_limit(tmp_path: Path, more: dict[str, Any]) -> None:
    """The last three of 13 steps are replayed twice, from the start of a cycle."""
    write_cached(tmp_path / "reference.json", "{}")
    cell = CELL.model_copy(update=more)
    cycle = make_strategy(cell).cycle
    needed = max(steps_with_replays(seed, cell.parity_steps, cycle) for seed in range(20))
    assert needed >= 13 + 6
    timed_seconds = 0.0 if cell.device == "cuda" else 0.65
    limit = limit_of(cell, reference=Reference(str(tmp_path)), timed_seconds=timed_seconds)
    assert limit >= 120 * needed / 13 + timed_seconds
    assert limit <= 120 * (needed + 2 * cycle) / 13 + 1


def steps_with_replays(seed: int, parity_steps: int, cycle: int) -> int:
    """Returns the steps of a trial of `parity_steps` steps that is rewound at its end."""
    rewinds, number, step = Rewinds(seed, parity_steps, cycle, ahead=True), 0, 0
    state = TrainState(torch.nn.Linear(1, 1), ())
    while not rewinds.enough or step < parity_steps:
        if rewinds.keeps(step):
            rewinds.keep(state, CELL, number)
            rewinds._ahead = True
        elif step >= parity_steps and rewinds.due(number, 0):
            rewinds.rewind(state)
            step = rewinds.from_step
        number, step = number + 1, step + 1
    return number


def runner_of(tmp_path: Path, plan: Plan, trials: Sequence[dict[str, Any]]) -> Runner:
    store = Store(tmp_path)
    store.write_run(RunRecord(**one_cell_run()))
    runner = Runner(store, plan, launcher=lambda packages: None)
    runner._recorded = [TrialRecord(**row) for row in trials]
    return runner


def test_a_heat_takes_as_long_as_its_steps(tmp_path: Path) -> None:
    """Six turns of three steps of 2 s take longer than HEAT_SECONDS."""
    plan = Plan("run-1", "test", (CELL, OTHER), 1, timed_seconds=2.0)
    slow = [trial_row(cell, wall_seconds=30.0, step_seconds_mean=2.0) for cell in (CELL, OTHER)]
    expected = 2 * (30.0 + 36.0 - 20.0)
    assert runner_of(tmp_path, plan, slow)._group_seconds([CELL, OTHER], 1) == expected
    heat = [row | TURNS | {"wall_seconds": 40.0, "trial": 1} for row in slow]
    assert runner_of(tmp_path, plan, slow + heat)._group_seconds([CELL, OTHER], 2) == 80.0
    fast = [row | {"step_seconds_mean": 0.001} for row in slow]
    expected = 2 * (30.0 + HEAT_SECONDS - 2.0)
    assert runner_of(tmp_path, plan, fast)._group_seconds([CELL, OTHER], 1) == expected


def with_trials(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, out_of_memory: Sequence[tuple[str, int]] = ()
) -> list[tuple[str, int]]:
    """Runs trials of 10 s without processes; returns strategy and number of each.

    `out_of_memory`: those that end so.
    """
    launched: list[tuple[str, int]] = []

    def run_trial(launcher: Any, cell: Cell, key: TrialKey, at: int, *rest: Any) -> TrialRecord:
        launched.append((cell.strategy, key.trial))
        status = "out_of_memory" if launched[-1] in out_of_memory else "ok"
        row = trial_row(cell, key.trial, status=status, wall_seconds=10.0) | {"position": at}
        runner.store.write_trial(trial := TrialRecord(**row))
        return trial

    def references(launcher: Any, cells: Sequence[Cell], announce: Any) -> dict[str, Any]:
        return {reference_key(cell): None for cell in cells}

    runner._recorded, runner.now = None, lambda: 10.0 * len(launched)
    monkeypatch.setattr(runner, "run_trial", run_trial)
    monkeypatch.setattr(runner._references, "of", references)
    assert runner.run(ProgressListener())
    return launched


def test_only_trials_still_to_be_launched_count_in_the_time_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third round has time for one trial; the other cell ran out of memory."""
    plan = Plan("run-1", "test", (CELL, OTHER), 3, time_budget_seconds=55.0)
    first = next(cell.strategy for cell, trial in plan.schedule() if trial == 2)
    second = {"ddp": "fsdp2", "fsdp2": "ddp"}[first]
    launched = with_trials(runner_of(tmp_path, plan, []), monkeypatch, [(second, 1)])
    assert launched[4:] == [(first, 2)]


def test_the_time_budget_of_planned_rounds_drops_no_further_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third round is dropped, so the further trial takes one of its positions."""
    plan = Plan("run-1", "test", (CELL, OTHER), 3, time_budget_seconds=45.0, until_answered=True)
    rounds = iter([[(CELL.id,)], []])

    monkeypatch.setattr("harness.run.runner.worth_launching", lambda *_: next(rounds, []))
    monkeypatch.setattr(TimeBudget, "shortest_that_fit", lambda _, seconds, *__: set(seconds))
    launched = with_trials(runner_of(tmp_path, plan, []), monkeypatch)
    assert launched[4:] == [("ddp", 2)]
