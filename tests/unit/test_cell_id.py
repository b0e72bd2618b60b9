"""A cell's id: the same for the same measurement, another where a default makes it another; older
records keep theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import harness.strategy.registry
from bench.expand import expand
from bench.host import Host
from bench.matrix import AXES, Matrix
from harness.analysis.history import histories
from harness.analysis.selection import measured
from harness.record.plan import Plan, kept_plan
from harness.record.run import RunRecord
from harness.record.store import Store
from harness.record.trial import TrialRecord
from harness.run.runner import Runner
from harness.spec.cell import _ALWAYS_IDENTITY, _NOT_IDENTITY, Cell
from harness.spec.training import TrainStep
from harness.strategy.base import Strategy
from harness.strategy.job import Job
from harness.strategy.registry import make_strategy, with_defaults
from tests.unit.compared_runs import compared
from tests.unit.made_results import run_row, trial_rows

DDP = Cell(strategy="ddp", devices=2)


class Before(Strategy):
    """A strategy, as it was."""

    bucket_mib: int = 25

    def setup(self, job: Job) -> TrainStep:
        raise AssertionError("it is only planned")


class After(Before):
    """The same with another default."""

    bucket_mib: int = 1


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> list[type[Strategy]]:
    """The class that strategy `mine` is of, last; more may be added while a test goes on."""
    classes: list[type[Strategy]] = [Before]
    monkeypatch.setattr(harness.strategy.registry, "strategies", lambda: {"mine": classes[-1]})
    return classes


def test_the_older_id_of_a_cell_stays() -> None:
    """It joins the histories of records of before schema version 7."""
    assert DDP.id == DDP.older_id == "60ef26e3c750"
    assert Cell(strategy="ddp", devices=2, options={"static_graph": True}).id != DDP.id


def test_the_id_of_a_planned_cell_stays() -> None:
    planned = with_defaults(DDP)
    assert planned.id == "9d6eed45cb73"
    assert planned.older_id == DDP.id
    assert (
        planned.model_copy(
            update={"time_limit_seconds": 5.0, "expect": "diverged", "system": "4 DDP"}
        ).id
        == planned.id
    )
    assert with_defaults(planned).id == planned.id


def test_every_field_of_today_is_in_the_id_or_said_not_to_be() -> None:
    """A new axis is in neither list: it joins the id where it is not at its default, which must
    then stay as it is."""
    later = {"defaults", "recompute", "compile"}
    assert _ALWAYS_IDENTITY | _NOT_IDENTITY | later == set(Cell.model_fields)


def test_another_default_of_an_option_is_another_measurement(release: list[type[Strategy]]) -> None:
    """DDP's buckets were 25 MiB by default, then 1: another training under the same id."""
    one = Cell(strategy="mine", devices=2)
    was = with_defaults(one)
    release.append(After)
    now = with_defaults(one)
    assert was.older_id == now.older_id
    assert was.id != now.id
    assert with_defaults(one.model_copy(update={"options": {"bucket_mib": 25}})).id == was.id, (
        "said or left out, it is the same"
    )
    assert was.label == now.label == "mine"


def test_a_cell_keeps_the_defaults_that_it_was_planned_with(release: list[type[Strategy]]) -> None:
    planned = Cell(**json.loads(with_defaults(Cell(strategy="mine")).model_dump_json()))
    release.append(After)
    assert make_strategy(planned).model_dump() == {"bucket_mib": 25}
    assert make_strategy(Cell(strategy="mine")).model_dump() == {"bucket_mib": 1}


def test_another_default_of_an_axis_is_another_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the older rule the cell that has the new default takes the id of the one that had the old
    one."""
    planned, older = with_defaults(DDP).id, DDP.older_id
    monkeypatch.setattr(Cell.model_fields["learning_rate"], "default", 3e-4)
    changed = DDP.model_copy(update={"learning_rate": 3e-4})
    assert changed.older_id == older
    assert with_defaults(changed).id != planned
    assert with_defaults(DDP).id == planned


def test_a_matrix_notes_the_defaults_and_cannot_set_them() -> None:
    (cell,) = expand(
        Matrix(cells=[{"strategy": "single", "workload": "llama-nano"}]), Host("cpu", 2, 2**34)
    ).cells
    assert cell.defaults == {}
    assert "defaults" not in AXES


def test_a_history_goes_on_over_the_change_of_rules(
    tmp_path: Path, release: list[type[Strategy]]
) -> None:
    """Records of before go with the first ones after; a default that changes later begins a history
    of its own."""
    one = Cell(strategy="mine", devices=2)
    cells = [one, one, with_defaults(one)]
    release.append(After)
    cells.append(with_defaults(one))
    store = Store(tmp_path)
    for day, cell in enumerate(cells, 1):
        run_id = f"2026010{day}T000000-aaaa"
        store.write_run(
            RunRecord(**run_row(run_id=run_id, started_at=run_row()["started_at"].replace(day=day)))
        )
        for row in trial_rows(cell, [100.0, 101.0, 102.0]):
            store.write_trial(TrialRecord(**(row | {"run_id": run_id})))
    series = histories(measured(store.load(steps=False)), "throughput")
    assert [(one.cell_id, len(one.points)) for one in series] == [
        (cells[2].id, 3),
        (cells[3].id, 1),
    ]


def test_a_comparison_matches_older_records_by_the_older_rule() -> None:
    planned = with_defaults(DDP)
    for was, now in ((DDP, planned), (planned, DDP), (DDP, DDP), (planned, planned)):
        (line,) = compared(
            trial_rows(was, [100.0, 100.1, 100.2]), trial_rows(now, [50.0, 50.1, 50.2])
        ).lines
        assert line.kind == "slower"


def test_a_comparison_does_not_match_other_defaults(release: list[type[Strategy]]) -> None:
    was = with_defaults(Cell(strategy="mine", devices=2))
    release.append(After)
    now = with_defaults(Cell(strategy="mine", devices=2))
    shared = trial_rows(DDP, [1.0, 1.0, 1.0])
    found = compared(
        [*trial_rows(was, [100.0] * 3), *shared], [*trial_rows(now, [50.0] * 3), *shared]
    )
    assert {line.kind for line in found.lines} == {"missing", "added", "no difference seen"}


def test_a_run_that_began_before_is_gone_on_with_by_its_ids(tmp_path: Path) -> None:
    """Its plan noted no defaults: what it has recorded is not run again."""
    store = Store(tmp_path)
    plan = Plan("run-1", "test", (DDP,), 2)
    older = json.loads(plan.to_json())
    for cell in older["cells"]:
        del cell["defaults"]
    store.write_run(RunRecord(**run_row(run_id="run-1", plan=json.dumps(older))))
    store.write_trial(TrialRecord(**(trial_rows(DDP, [100.0])[0] | {"run_id": "run-1"})))
    todo = Runner(store, kept_plan(store, "run-1")).open_trials()
    assert [(key.cell_id, key.trial) for _, _, key in todo] == [(DDP.id, 1)]
