"""Trials that a run launches: planned rounds, skipped trials and added rounds."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from bench.planning import kept_or_new_plan
from bench.run_options import CommandOptions
from harness.analysis.race import MOST_IN_HEAT, Entrants, contenders, next_heats, top_two
from harness.analysis.stats import LogEstimate
from harness.cell.cell import Cell
from harness.cell.durable import write_cached
from harness.parity.reference import Reference
from harness.parity.reference_runs import reference_key
from harness.record.plan import LeftOut, Plan
from harness.record.run_record import RunRecord
from harness.record.store import EndedTrial, Store, TrialKey
from harness.record.trial import TrialRecord
from harness.run.allocation import TimeBudget, launches_per_round, not_compared
from harness.run.prepared import REWOUND_ELSEWHERE, PreparedTrial
from harness.run.runner import ProgressListener, Runner
from tests.unit.stored_trials import one_cell_run, trial_row


def no_references(launcher: Any, cells: Sequence[Cell], announce: Any) -> dict[str, Any]:
    return {reference_key(cell): None for cell in cells}


def test_plans_survive_the_store(tmp_path: Path) -> None:
    cell = Cell(strategy="ddp", devices=2, options={"static_graph": True})
    plan = Plan(
        "r", "m", (cell,), 3, (LeftOut(Cell(strategy="single", devices=2), "refused", "no"),), 7
    )
    assert Plan.from_row({"run_id": "r", "matrix": "m", "plan": plan.to_json()}) == plan


def test_plans_of_older_versions_are_read() -> None:
    """They name fp32 twins apart, and may have a precision or interleave all trials."""
    plan = Plan("r", "m", (Cell(strategy="ddp"),), 3, (), 7, not_compared=frozenset({"a", "b"}))
    content = json.loads(plan.to_json()) | {"once": ["a"], "not_compared": ["b"]}
    content |= {"precision": 0.02, "interleaved": True}
    assert Plan.from_row({"run_id": "r", "matrix": "m", "plan": json.dumps(content)}) == plan


def test_rounds_hold_every_cell_once_and_are_shuffled() -> None:
    many = tuple(Cell(strategy="ddp", seed=i) for i in range(20))
    order = Plan("r", "m", many, 3, (), 1).schedule()
    rounds = [[c.seed for c, t in order if t == trial] for trial in range(3)]
    assert all(sorted(one) == list(range(20)) for one in rounds)
    assert [t for _, t in order] == [0] * 20 + [1] * 20 + [2] * 20
    assert len({tuple(one) for one in rounds}) == 3


def test_baselines_are_launched_more_often_within_each_round() -> None:
    """A baseline gets the square root of its number of comparisons; launches are numbered."""
    ddp = Cell(strategy="ddp", devices=2)
    others = [Cell(strategy="ddp", devices=2, options={"bucket_cap_mb": i}) for i in range(1, 10)]
    crowded = Cell(strategy="ddp", devices=512, global_batch=512)
    alone = Cell(strategy="fsdp2", devices=2, sequence_length=32)
    cells = (*others, ddp, crowded, alone)
    assert launches_per_round(cells, 256) == {ddp.id: 3}
    assert not_compared(cells, 256) == {crowded.id, alone.id}
    more = launches_per_round(cells, 256)
    once = not_compared(cells, 256)
    plan = Plan("r", "m", cells, 2, (), 1, timed_seconds=3.0, not_compared=once)
    plan = replace(plan, launches_per_round=more)
    order = plan.schedule()
    assert len(set(order_ids := [(cell.id, trial) for cell, trial in order])) == len(order) == 26
    assert sorted(t for c, t in order_ids if c == ddp.id) == list(range(plan.trials_of(ddp)))
    first = [cell.id for cell, _ in order[:14]]
    assert first.count(ddp.id) == 3
    assert {cell.id for cell in cells} == set(first)
    assert [plan.timed_seconds_of(cell) for cell in (ddp, crowded, alone)] == [3.0, 0.0, 0.0]
    longer = dataclasses.replace(plan, trials=4)
    launches = Counter(cell.id for cell, _ in longer.schedule())
    assert [launches[cell.id] for cell in (others[0], ddp, crowded, alone)] == [4, 12, 1, 1]
    assert all(longer.trials_of(cell) == launches[cell.id] for cell in cells)
    assert Plan.from_row({"run_id": "r", "matrix": "m", "plan": plan.to_json()}) == plan


class Recorder(ProgressListener):
    """Watcher that records added rounds and launches left out."""

    def __init__(self) -> None:
        self.added: list[Sequence[Cell]] = []
        self.left_out = 0

    def round_added(self, cells: Sequence[Cell], among: str) -> None:
        self.added.append(cells)

    def time_is_spent(self, left_out: int) -> None:
        self.left_out += left_out


def without_processes(
    monkeypatch: pytest.MonkeyPatch,
    store: Store,
    plan: Plan,
    launched: list[tuple[Cell, int]],
    now: Callable[[], float] = time.monotonic,
) -> Runner:
    """Returns a runner that records each trial at once, and adds its cell and number to
    `launched`."""
    runner = Runner(store, plan, launcher=lambda packages: None, now=now)

    def run_trial(launcher: Any, cell: Cell, key: TrialKey, *rest: Any) -> TrialRecord:
        launched.append((cell, key.trial))
        row = trial_row(cell, key.trial, samples_per_second=11.0, wall_seconds=2.0)
        store.write_trial(trial := TrialRecord(**row))
        return trial

    monkeypatch.setattr(runner, "run_trial", run_trial)
    monkeypatch.setattr(runner._references, "of", no_references)
    return runner


@pytest.mark.parametrize("has_run", [True, False])
def test_a_cell_predicted_to_lack_memory_is_skipped_unless_it_has_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_run: bool
) -> None:
    """The smaller cell ran out of memory. A predicted lack of memory is not a result."""
    small, large = (
        Cell(strategy="ddp", workload="llama-nano", time_limit_seconds=60),
        Cell(strategy="ddp", workload="llama-nano", global_batch=16, system="DDP"),
    )
    store = Store(tmp_path)
    plan = Plan("run-1", "test", (small, large), 2)
    store.write_run(RunRecord(**one_cell_run()))
    if has_run:
        store.write_trial(TrialRecord(**trial_row(large, 0)))
    store.write_trial(TrialRecord(**trial_row(small, 0, status="out_of_memory")))
    launched: list[tuple[Cell, int]] = []
    assert without_processes(monkeypatch, store, plan, launched).run(Recorder())
    assert launched == ([(large, 1)] if has_run else [])
    statuses = store.load().trials.set_index("cell_id")["status"].to_dict()
    assert statuses == {large.id: "ok" if has_run else "skipped", small.id: "out_of_memory"}
    assert Runner(store, plan).open_trials() == [], "a resumed run launches nothing more"


def test_cells_left_out_are_recorded_also_by_a_run_that_was_killed_before(tmp_path: Path) -> None:
    left = LeftOut(Cell(strategy="single", devices=2), "refused", "no")
    store = Store(tmp_path)
    store.write_run(RunRecord(**one_cell_run()))
    for _ in range(2):
        assert Runner(store, Plan("run-1", "test", (), 1, (left,))).run(Recorder())
        assert store.load().trials["status"].tolist() == ["refused"]


def test_the_third_round_is_cut_short_where_the_machine_is_slower_than_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = tuple(Cell(strategy=name) for name in ("single", "ddp", "fsdp2"))
    plan = Plan("run-1", "test", cells, 3, (), 7, until_answered=True, time_budget_seconds=16.0)
    store, watcher = Store(tmp_path), Recorder()
    store.write_run(RunRecord(**one_cell_run()))
    launched: list[tuple[Cell, int]] = []
    ticks = itertools.count(0, 5)
    now = lambda: float(next(ticks))  # noqa: E731
    assert without_processes(monkeypatch, store, plan, launched, now).run(watcher)
    launches = Counter(trial for _, trial in launched)
    assert launches == {0: 3, 1: 3, 2: 2}, "a trial of 2 s does not fit into 16 s at 15 s"
    assert (watcher.left_out, watcher.added) == (1, [])


def test_the_launches_that_take_longest_are_left_out_first() -> None:
    seconds = dict(zip(("single", "ddp", "fsdp1", "fsdp2", "tensor"), (2, 9, 3, 8, 2), strict=True))
    cells = tuple(Cell(strategy=name) for name in seconds)
    plan = Plan("r", "m", cells, 3, until_answered=True, time_budget_seconds=60.0)
    now = 0.0
    budget = TimeBudget(plan, lambda: now)
    budget.took.update({cell.id: float(seconds[cell.strategy]) for cell in cells})
    order = list(enumerate(plan.schedule()))
    todo = [cell for _, (cell, _) in order]
    assert not any(budget.leaves_out(at, cell, todo[at:]) for at, (cell, _) in order[:10])
    now, launched = 44.0, []  # 16 s remain for launches of 24 s
    for at, (cell, _) in order[10:]:
        if not budget.leaves_out(at, cell, todo[at:]):
            launched.append(cell.strategy)
            now += seconds[cell.strategy]
    assert sorted(launched) == ["fsdp1", "fsdp2", "single", "tensor"]
    assert (budget.left_out, now) == (1, 59.0)


def test_only_the_third_round_has_launches_that_may_be_left_out() -> None:
    cells = tuple(Cell(strategy=name) for name in ("single", "ddp", "fsdp2"))
    plan = Plan("r", "m", cells, 3, until_answered=True, time_budget_seconds=60.0)
    assert plan.spare_from == 6
    assert replace(plan, until_answered=False).spare_from == 6, "of a run with --trials"
    several = replace(plan, launches_per_round={cells[1].id: 3})
    assert several.spare_from == 10
    for without in (
        replace(plan, trials=2, launches_per_round={cells[1].id: 3}),
        replace(plan, time_budget_seconds=None),
        replace(plan, not_compared=frozenset(cell.id for cell in cells)),
    ):
        assert without.spare_from == len(without.schedule())


def test_the_shortest_launches_of_a_further_round_fill_what_is_left() -> None:
    plan = Plan("r", "m", (), 3, until_answered=True, time_budget_seconds=60.0)
    now = 0.0
    budget = TimeBudget(plan, lambda: now)
    seconds = {"spawned": 9.0, "ddp": 2.0, "single": 3.0, "fsdp2": 4.0}
    assert budget.shortest_that_fit(seconds) == set(seconds)
    now = 54.0
    assert budget.shortest_that_fit(seconds) == {"ddp", "single"}
    assert budget.shortest_that_fit({}) == set()


def test_a_resumed_run_counts_the_time_of_recorded_trials() -> None:
    cells = (Cell(strategy="single"), Cell(strategy="ddp"))
    plan = Plan("r", "m", cells, 2, until_answered=True)
    began = datetime.now(timezone.utc)
    before = [
        EndedTrial(cell.id, cell.name, trial, 1, 0, "ok", began, 10.0)
        for cell in cells
        for trial in range(2)
    ]
    further = EndedTrial(cells[0].id, cells[0].name, 2, 1, 4, "ok", began, 6.0)
    seconds = {"short": 3.0, "long": 5.0}
    for recorded, fitting in ((before, {"short", "long"}), ([*before, further], {"short"})):
        budget = TimeBudget(plan, lambda: 0.0, recorded)
        assert budget.shortest_that_fit(seconds) == fitting, "10 s in addition to 40 s"


def test_a_resumed_race_fetches_references_of_other_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the cell of the other model has open trials; then the race asks for one of the tie."""
    open_, *tied = (
        Cell(strategy="ddp", devices=2, workload="gpt2-nano"),
        Cell(strategy="ddp", devices=2, workload="llama-nano"),
        Cell(strategy="fsdp2", devices=2, workload="llama-nano"),
    )
    store = Store(tmp_path)
    store.write_run(RunRecord(**one_cell_run()))
    for cell, trial in itertools.product(tied, range(3)):
        row = trial_row(cell, trial, samples_per_second=10.0 + trial, wall_seconds=2.0)
        store.write_trial(TrialRecord(**row))
    plan = Plan("run-1", "test", (open_, *tied), 3, (), 7, until_answered=True)
    launched: list[tuple[Cell, int]] = []
    now = lambda: 2.0 * len(launched)  # noqa: E731
    runner = without_processes(monkeypatch, store, plan, launched, now)
    fetched: list[set[str]] = []

    def references(launcher: Any, cells: Sequence[Cell], announce: Any) -> dict[str, Any]:
        fetched.append({cell.workload for cell in cells})
        return no_references(launcher, cells, announce)

    monkeypatch.setattr(runner._references, "of", references)
    assert runner.run(Recorder())
    by_model = Counter(cell.workload for cell, _ in launched)
    assert by_model == {"gpt2-nano": 3, "llama-nano": 2}, "a quarter of the 18 s of planned rounds"
    assert fetched == [{"gpt2-nano"}, {"llama-nano"}]


def test_other_settings_wait_until_the_headline_has_raced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trial takes 2 s of 30 s. 2.2 s are reserved for each of the other settings' trials."""
    options: list[dict[str, Any]] = [{}, {"static_graph": True}, {"bucket_cap_mb": 1}]
    headline, other = (
        [Cell(strategy="ddp", devices=2, workload=workload, options=own) for own in options[:count]]
        for workload, count in (("llama-nano", 3), ("gpt2-nano", 2))
    )
    cells = (*headline, *other)
    plan = Plan("run-1", "test", cells, 1, (), 7, until_answered=True, time_budget_seconds=30.0)
    store = Store(tmp_path)
    store.write_run(RunRecord(**one_cell_run()))
    launched: list[tuple[Cell, int]] = []
    runner = without_processes(monkeypatch, store, plan, launched, lambda: 2.0 * len(launched))
    record = runner.run_trial

    def noisy(launcher: Any, cell: Cell, key: TrialKey, at: int, *rest: Any) -> TrialRecord:
        positions.append(at)
        rate = 10.0 + 0.1 * (7 * len(launched) % 5)
        return replace(record(launcher, cell, key, at, *rest), samples_per_second=rate, position=at)

    positions: list[int] = []
    monkeypatch.setattr(runner, "run_trial", noisy)
    assert runner.run(Recorder())
    workloads = [cell.workload for cell, _ in launched]
    first_other = workloads.index("gpt2-nano")
    assert first_other == 12, "25.6 of 30 s: one more heat does not fit"
    assert workloads[first_other : first_other + 2] == ["gpt2-nano"] * 2
    assert sorted(positions) == [*range(len(launched))], "each position is used once"
    assert [at for at in positions if at < len(cells)] == positions[:3] + positions[12:14]


def test_a_race_drops_what_is_far_behind_and_asks_leaders_again() -> None:
    near = {str(number): LogEstimate(-0.01 * number, 0.02, 20, 3) for number in range(4)}
    far = {"far": LogEstimate(-0.5, 0.02, 20, 3)}
    assert contenders(near | far) == near.keys()
    assert contenders({"a": LogEstimate(0.0, 0.0, 0, 1), "b": LogEstimate(-1.0, 0.0, 0, 1)}) == {
        "a",
        "b",
    }, "without a spread nothing is known to be behind"
    noisy = {str(number): LogEstimate(-0.14, 0.02, 4, 1) for number in range(50)}
    noisy["first"] = LogEstimate(0.0, 0.02, 4, 3)
    assert contenders(noisy) == noisy.keys(), "4.9 errors behind, but one of 50 may be the fastest"
    chance = random.Random(1)
    drawn = Counter(name for _ in range(200) for name in top_two(near, chance))
    assert drawn["0"] > drawn["1"] > drawn["3"] > 0
    apart = {"a": LogEstimate(0.0, 1e-6, 20, 3), "b": LogEstimate(-1.0, 1e-6, 20, 3)}
    assert top_two(apart, chance) == ("a",)


def test_the_headline_races_first() -> None:
    def cells(trials: int, prefix: str, number: int) -> dict[str, LogEstimate]:
        return {f"{prefix}{i}": LogEstimate(-0.001 * i, 0.02, 20, trials) for i in range(number)}

    far = {"far": LogEstimate(-0.5, 0.02, 20, 1)}
    small = Entrants(cells(2, "s", 2), "s0")
    chance = random.Random(1)
    new = Entrants(cells(1, "n", 5) | far, "n0")
    assert next_heats([new, small], chance) == [("n0", "n1", "n2", "n3"), ("n0", "n4")]
    minor = Entrants(cells(1, "k", 2), "k0")
    open_ = Entrants(cells(2, "l", 9) | far, "l1")
    assert next_heats([open_, minor], chance) == [("k0",), ("k1",)]
    for settings, headline_only in (([open_, minor], True), ([open_, small], False)):
        (drawn,) = next_heats(settings, chance, headline_only)
        assert drawn[0] == "l1"
        assert 1 < len(drawn) == len(set(drawn)) <= MOST_IN_HEAT
        assert set(drawn) <= open_.speeds.keys() - {"far"}
    frugal = Entrants(cells(2, "m", 2) | far, "m0", far)
    assert next_heats([frugal, small], chance) == [("m0", "far")], "it may need the least memory"
    decided = {"a": LogEstimate(0.0, 1e-4, 20, 2), "b": LogEstimate(-1.0, 1e-4, 20, 2)}
    assert next_heats([Entrants(decided, "b")], chance) == []
    assert next_heats([Entrants(decided, "b"), minor], chance, True) == [("k0",), ("k1",)]
    vague = {"a": LogEstimate(0.0, 0.02, 20, 2), "b": LogEstimate(-1.0, 0.02, 20, 1)}
    assert next_heats([Entrants(vague, "b")], chance) == [("b", "a")], "its gain is not known"
    assert next_heats([Entrants(far, "far")], chance) == [], "there is nothing to choose"
    assert next_heats([], chance) == []


@pytest.mark.parametrize(("rates", "steps"), [((10.0, 10.1), 30), ((10.0, 10.5), 48)])
def test_heats_are_longer_where_starting_takes_long_and_turns_are_noisy(
    tmp_path: Path, rates: tuple[float, float], steps: int
) -> None:
    """A start takes 6 s and a step 0.1 s, so 3 s are 30 steps."""
    cell = Cell(strategy="ddp", devices=2)
    runner = Runner(Store(tmp_path), Plan("run-1", "test", (cell,), 1))
    row = trial_row(cell, turn_samples_per_second=rates * 15, turn_began=(0.0,) * 30)
    row |= {"step_seconds_mean": 0.1, "steps_taken": 90, "wall_seconds": 15.0}
    runner._recorded = [TrialRecord(**row)]
    assert runner._steps_of_heat([cell]) == steps


def test_one_of_three_launches_of_a_cell_is_rewound(tmp_path: Path) -> None:
    """Cells with fewer launches also have one; the run's seed decides which."""
    folder = tmp_path / "reference"
    folder.mkdir()
    write_cached(folder / "reference.json", "{}")

    def chosen(trial: int, launches: int, seed: int) -> bool:
        cell = Cell(strategy="ddp", workload="llama-nano")
        known, key = Reference(str(folder)), TrialKey(cell.id, trial)
        trained = PreparedTrial(cell, key, 0, known, 0.5, seed, launches)
        assert trained.rewind_skipped_reason == (
            "" if "rewind_seed" in trained.launch.more else REWOUND_ELSEWHERE
        )
        return not trained.rewind_skipped_reason

    for launches, most in ((1, 1), (2, 1), (3, 1), (6, 2)):
        for seed in range(4):
            assert sum(chosen(trial, launches, seed) for trial in range(launches)) == most
    assert len({chosen(0, 3, seed) for seed in range(12)}) == 2


def test_when_a_run_stops_adding_rounds(tmp_path: Path) -> None:
    matrix = tmp_path / "m.yaml"
    matrix.write_text("time_budget_minutes: 3\ncells: [{strategy: single, workload: llama-nano}]\n")

    def planned(**options: Any) -> Plan:
        return kept_or_new_plan(Store(tmp_path), CommandOptions(matrix=str(matrix), **options))[0]

    assert planned().time_budget_seconds == 180
    assert planned(time_budget_seconds=60).time_budget_seconds == 60
    assert planned().until_answered
    assert not planned(trials=3).until_answered
    assert planned(trials=3).time_budget_seconds is None
    limited = planned(trials=3, time_budget_seconds=60)
    assert (limited.time_budget_seconds, limited.until_answered) == (60, False)
    assert limited.spare_from == 2
    matrix.write_text("trials: 1\ncells: [{strategy: single, workload: llama-nano}]\n")
    assert not planned(timed_seconds=0).until_answered
    once = planned(timed_seconds=0, time_budget_seconds=60)
    assert (once.time_budget_seconds, once.until_answered) == (60, True)
