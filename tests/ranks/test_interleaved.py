"""Interleaved launches train one at a time, and one that fails does not affect the others."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.analysis.answer import answer
from harness.analysis.summary import cell_results
from harness.cell.cell import Cell
from harness.launch.interleaved import InterleavedLauncher, Launch
from harness.launch.launcher import Launcher
from harness.launch.outcome import Outcome
from harness.record.plan import Plan
from harness.record.store import Store
from harness.record.trial import TrialRecord
from harness.run import runner as runner_module
from harness.run.runner import FEWEST_TURNS, ProgressListener, Runner
from harness.seam.registry import validate
from harness.workloads import make_workload, prepare_data
from tests.ranks.conftest import cell, representative
from tests.waiting import LONG, at_first_step, interrupt, until, when


@pytest.fixture(scope="module")
def interleaved(plugin: object) -> Iterator[InterleavedLauncher]:
    launcher = InterleavedLauncher([], 3)
    yield launcher
    launcher.close()


def launch(one: Cell) -> Launch:
    workload = make_workload(one.workload)
    _, layout = validate(one, workload)
    data = prepare_data(one.data, workload, one.sequence_length)
    return Launch(one, data, layout.processes)


def faulty(fault: str, **axes: object) -> Cell:
    return cell("faulty", options={"fault": fault}, **axes)


def together(interleaved: InterleavedLauncher, *cells: Cell) -> list[Outcome]:
    return interleaved.together([launch(one) for one in cells])


def fine(outcome: Outcome, timed: int = 5) -> None:
    assert outcome.status == "ok", (outcome.reason, outcome.log_tail)
    assert [sum(step.phase == "timed" for step in rank.steps) for rank in outcome.trained] == [
        timed,
        timed,
    ]


def test_one_trains_at_a_time(interleaved: InterleavedLauncher) -> None:
    """Three launches alternate, and each turn ends before another launch's begins."""
    axes = {"timed_steps": 20, "parity_steps": 3}
    outcomes = together(
        interleaved, cell("ddp", **axes), cell("fsdp2", **axes), cell("ddp", **axes)
    )
    for outcome in outcomes:
        fine(outcome, 20)
    turns = sorted(
        (
            began,
            number,
            sum(step.step_seconds for step in outcome.trained[0].steps[first : first + 3]),
        )
        for number, outcome in enumerate(outcomes)
        for first, began in outcome.trained[0].time_slices
    )
    assert [number for _, number, _ in turns] == [0, 1, 2] * 10
    for (began, _, seconds), (after, _, _) in itertools.pairwise(turns):
        assert began + seconds < after


def test_a_race_trains_its_heats_interleaved(
    interleaved: InterleavedLauncher,
    launcher: Launcher,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A cell whose number of steps is fixed takes separate trials."""
    monkeypatch.setattr(interleaved, "close", lambda: None)
    monkeypatch.setattr("harness.run.runner.InterleavedLauncher", lambda *_: interleaved)
    monkeypatch.setattr("harness.run.runner.Launcher", lambda _: launcher)
    monkeypatch.setattr("harness.run.runner.HEAT_SECONDS", 0.1)
    monkeypatch.setattr("harness.host.cores.quota_cores", lambda: None)  # else nothing is raced
    for pid in interleaved.pids:
        launcher.ignore_pid(pid)
    fixed = cell("ddp_elastic")
    cells = (cell("ddp"), cell("ddp", options={"static_graph": True}), cell("fsdp1"), fixed)
    plan = Plan("heats", "test", cells, 1, timed_seconds=0.05, until_answered=True)
    # The budget lasts five readings of this clock, and is enough for heats on any machine.
    plan = dataclasses.replace(plan, time_budget_seconds=5e5, launches_per_round={cells[0].id: 3})
    store, clock = Store(tmp_path / "results"), itertools.count(0.0, 1e5)
    runner = Runner(store, plan, runner_module.Launcher, now=clock.__next__)
    runner.begin()
    assert runner.run(ProgressListener())
    found = TrialRecord.from_frame(store.load(steps=False).trials)
    assert {(trial.status, trial.parity_verdict) for trial in found} == {("ok", "exact")}
    in_heats = [trial for trial in found if trial.turn_began]
    assert fixed.id not in {trial.cell_id for trial in in_heats}
    separate = {trial.trial for trial in found if trial not in in_heats}
    assert separate >= {0, 1, 2}
    assert separate.isdisjoint(trial.trial for trial in in_heats)
    heats = {trial.trial for trial in in_heats}
    assert heats
    for number in heats:
        heat = [trial for trial in in_heats if trial.trial == number]
        assert 2 <= len(heat) <= 3
        assert cells[0].id in {trial.cell_id for trial in heat}
        (turns,) = {len(trial.turn_began) for trial in heat}
        assert turns >= FEWEST_TURNS
    results = cell_results(store.load(steps=False).trials)
    raced = [result for result in results if result.cell_id in {t.cell_id for t in in_heats}]
    assert len(raced) >= 2
    for result in raced:
        assert result.speed.log_throughput is not None
        assert result.speed.log_throughput.level_error > 0
        own = {trial.trial for trial in in_heats if trial.cell_id == result.cell_id}
        assert own <= result.speed.by_round.keys()
    assert answer(results) is not None


@pytest.mark.parametrize("fault", representative(["killed", "raises_in_setup", "exits"]))
def test_one_that_fails_leaves_the_others_alone(
    interleaved: InterleavedLauncher, fault: str
) -> None:
    first, failed, last = together(interleaved, cell("ddp"), faulty(fault), cell("ddp"))
    fine(first)
    fine(last)
    assert (failed.status, failed.reason[:6]) == ("failed", "rank 1")


@pytest.mark.alone
def test_a_time_limit_counts_a_launchs_own_turns(interleaved: InterleavedLauncher) -> None:
    """The first launch waits for longer than its own limit while another hangs until its limit."""
    first, hung, last = together(
        interleaved,
        cell("ddp", time_limit_seconds=8),
        faulty("hangs", time_limit_seconds=10),
        cell("ddp"),
    )
    fine(first)
    fine(last)
    assert hung.status == "timeout"
    assert "faulty.py" in hung.stacks
    assert first.wall_seconds < 8 < 10 < hung.wall_seconds


def test_a_stop_interrupts_them_all(interleaved: InterleavedLauncher) -> None:
    """After the first turn, one launch waits, one is about to hang and one has not begun."""
    cells = cell("ddp"), faulty("hangs", time_limit_seconds=LONG), cell("ddp")
    outcomes = interleaved.together([launch(one) for one in cells], at_first_step(interrupt))
    assert [outcome.status for outcome in outcomes] == ["interrupted"] * 3
    for outcome in together(interleaved, cell("ddp"), cell("ddp")):
        fine(outcome)


def test_an_error_of_the_run_leaves_no_rank_waiting(interleaved: InterleavedLauncher) -> None:
    """An error in the progress display ends all launches; their processes serve the next ones."""

    def fails(step: int, seconds: float) -> None:
        raise OSError("the terminal is gone")

    with pytest.raises(OSError, match="the terminal is gone"):
        interleaved.together([launch(cell("ddp")), launch(cell("ddp"))], fails)
    for outcome in together(interleaved, cell("ddp"), cell("ddp")):
        fine(outcome)


def test_a_launchers_process_that_is_killed_is_one_failure(plugin: object) -> None:
    """One process is killed before its first turn, another while its ranks hang."""
    interleaved = InterleavedLauncher([], 3)
    early, late = (psutil.Process(process.ready()) for process in interleaved._processes[1:])
    pool = interleaved._processes[1].pool

    def kill() -> None:
        early.kill()
        until(lambda: pool._broken)

    def has_ranks() -> bool:
        return any(child.children() for child in late.children())

    cells = cell("ddp"), cell("ddp"), faulty("hangs", time_limit_seconds=LONG)
    with when(has_ranks, late.kill):
        first, *lost = interleaved.together([launch(one) for one in cells], at_first_step(kill))
    fine(first)
    assert [outcome.status for outcome in lost] == ["failed"] * 2
    assert all("process that launched" in outcome.reason for outcome in lost)
    try:
        for outcome in together(interleaved, cell("ddp"), cell("ddp")):
            fine(outcome)
    finally:
        interleaved.close()
