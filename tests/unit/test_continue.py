"""Continuing a run by its name: which options may be repeated, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.planning import FROM_PYTHON, kept_or_new_plan
from bench.run_options import CommandOptions
from harness.cell.cell import Cell
from harness.cell.errors import NoRuns, UsageError
from harness.host.environment import environment
from harness.record.plan import Plan
from harness.record.run_record import RunRecord
from harness.record.store import Store
from tests.unit.made_results import run_row

CELLS = ({"strategy": "single", "workload": "llama-nano"},)
OTHERS = ({"strategy": "ddp", "workload": "llama-nano", "devices": 2},)


@pytest.fixture
def matrix(tmp_path: Path) -> str:
    file = tmp_path / "m.yaml"
    file.write_text("cells: [{strategy: [ddp, fsdp2], devices: 2, workload: llama-nano}]\n")
    return str(file)


def begin(store: Store, run_id: str, elsewhere: bool = False, **options: Any) -> Plan:
    """Plans a run and writes its row as of this machine, or of another."""
    plan, begun = kept_or_new_plan(store, CommandOptions(run_id=run_id, **options))
    assert not begun
    columns = environment() | ({"cpu_cores": 1000} if elsewhere else {})
    row = run_row(run_id=run_id, matrix=plan.matrix, plan=plan.to_json(), **columns)
    store.write_run(RunRecord(**row))
    return plan


def go_on(store: Store, run_id: str = "a", resume: bool = False, **options: Any) -> Plan:
    plan, begun = kept_or_new_plan(store, CommandOptions(run_id=run_id, resume=resume, **options))
    assert begun
    return plan


def test_the_same_options_or_none_continue_a_run(tmp_path: Path, matrix: str) -> None:
    store = Store(tmp_path / "results")
    given: dict[str, Any] = {
        "matrix": matrix,
        "only": ("ddp",),
        "settings": {"batch": 16},
        "trials": 3,
        "time_budget_seconds": 60.0,
    }
    plan = begin(store, "a", **given)
    assert go_on(store, **given) == plan
    assert go_on(store, matrix=matrix) == plan, "as documented for cancelled jobs"
    assert go_on(store, matrix="elsewhere/m.yaml") == plan
    assert go_on(store) == plan


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"only": ("fsdp2",)}, "different cells"),
        ({"settings": {"batch": 32}}, "different cells"),
        ({"model": "llama-mini"}, "different cells"),
        ({"trials": 5}, "different trials"),
        ({"time_budget_seconds": 7.0, "timed_seconds": 9.0}, "time budget and timed seconds"),
        ({"matrix": "smoke"}, "not 'smoke'"),
        ({"matrix": "", "only": ("ddp",)}, "--matrix"),
    ],
)
def test_options_of_another_plan_are_refused(
    tmp_path: Path, matrix: str, changes: dict[str, Any], said: str
) -> None:
    store = Store(tmp_path / "results")
    begin(store, "a", matrix=matrix)
    with pytest.raises(UsageError, match=f"^run 'a' .*{said}"):
        go_on(store, **{"matrix": matrix, **changes})


def test_a_job_on_another_machine_continues_a_run(tmp_path: Path, matrix: str) -> None:
    """Sizes such as `many` may give other cells there."""
    store = Store(tmp_path / "results")
    plan = begin(store, "a", elsewhere=True, matrix=matrix, only=("ddp",), trials=2)
    assert go_on(store, matrix=matrix, only=("fsdp2",)) == plan
    with pytest.raises(UsageError, match="different trials"):
        go_on(store, matrix=matrix, trials=3)


def test_cells_given_in_python(tmp_path: Path) -> None:
    store = Store(tmp_path / "results")
    plan = begin(store, "a", cells=CELLS)
    assert plan.matrix == FROM_PYTHON
    assert go_on(store, cells=CELLS) == plan
    with pytest.raises(UsageError, match="different cells"):
        go_on(store, cells=OTHERS)


def test_a_search_is_not_continued_as_a_run(tmp_path: Path) -> None:
    store = Store(tmp_path)
    search = Plan("s", "maxsize", (Cell(strategy="single"),), 1, search={"budget": 1})
    row = run_row(run_id="s", matrix="maxsize", plan=search.to_json())
    store.write_run(RunRecord(**row))
    for resume in (False, True):
        with pytest.raises(UsageError, match="maxsize --resume"):
            go_on(store, "s", resume)


def test_resume_takes_the_name_of_a_run(tmp_path: Path, matrix: str) -> None:
    store = Store(tmp_path / "results")
    with pytest.raises(NoRuns):
        go_on(store, resume=True)
    first = begin(store, "first", matrix=matrix)
    begin(store, "second", matrix=matrix)
    assert go_on(store, "first", resume=True) == go_on(store, "fir", resume=True) == first
    for changes in ({"run_id": "thrid"}, {"trials": 2}, {"matrix": "smoke"}):
        with pytest.raises(UsageError):
            go_on(store, **{"run_id": "first", "resume": True, **changes})
