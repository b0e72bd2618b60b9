"""Cell ids: equal for equal measurements, different if a default changes the measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import harness.seam.registry
from bench.matrix import AXES
from harness.cell.cell import Cell
from harness.cell.training import TrainStep
from harness.record.store import load
from harness.seam.base import Strategy
from harness.seam.job import Job
from harness.seam.registry import make_strategy, with_defaults

DDP = Cell(strategy="ddp", devices=2)
DEFAULTS = Path(__file__).parents[1] / "golden" / "cell_defaults.json"


class Before(Strategy):
    """The strategy with its old default."""

    bucket_mib: int = 25

    def setup(self, job: Job) -> TrainStep:
        raise AssertionError("tests only plan it")


class After(Before):
    """The strategy with a new default."""

    bucket_mib: int = 1


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> list[type[Strategy]]:
    """Classes of strategy `mine`, of which the last counts; tests may append others."""
    classes: list[type[Strategy]] = [Before]
    monkeypatch.setattr(harness.seam.registry, "strategies", lambda: {"mine": classes[-1]})
    return classes


def test_the_id_covers_only_what_is_measured() -> None:
    planned = with_defaults(DDP)
    labels = {"time_limit_seconds": 5.0, "expect": "diverged", "system": "4 DDP"}
    assert planned.model_copy(update=labels).id == planned.id
    assert with_defaults(planned).id == planned.id
    for changes in ({"options": {"static_graph": True}}, {"seed": 1}, {"learning_rate": 3e-4}):
        assert planned.model_copy(update=changes).id != planned.id
    assert "defaults" not in AXES, "a matrix cannot set them"


def test_the_ids_of_the_reference_run_are_those_of_its_cells() -> None:
    trials = load(Path(__file__).parents[2] / "results" / "reference").trials
    for cell_id, cell in zip(trials["cell_id"], trials["cell"], strict=True):
        assert Cell(**json.loads(cell)).id == cell_id


def test_another_default_of_an_option_is_another_measurement(release: list[type[Strategy]]) -> None:
    """Without defaults in the id, changing buckets from 25 to 1 MiB would keep the id."""
    one = Cell(strategy="mine", devices=2)
    was = with_defaults(one)
    release.append(After)
    now = with_defaults(one)
    assert was.id != now.id
    assert with_defaults(one.model_copy(update={"options": {"bucket_mib": 25}})).id == was.id, (
        "stating a default does not change the id"
    )
    assert was.label == now.label == "mine"


def test_a_cell_keeps_the_defaults_that_it_was_planned_with(release: list[type[Strategy]]) -> None:
    planned = Cell(**json.loads(with_defaults(Cell(strategy="mine")).model_dump_json()))
    release.append(After)
    assert make_strategy(planned).model_dump() == {"bucket_mib": 25}
    assert make_strategy(Cell(strategy="mine")).model_dump() == {"bucket_mib": 1}


def test_the_default_of_an_axis_never_changes(update: bool) -> None:
    """The id omits fields at their defaults, so a new default would reuse the ids of older
    measurements that differ. A new axis adds a line to the golden file."""
    defaults = {
        name: field.default
        for name, field in Cell.model_fields.items()
        if not field.is_required() and name not in ("options", "defaults")
    }
    if update:
        DEFAULTS.write_text(json.dumps(defaults, indent=1) + "\n")
    assert defaults == json.loads(DEFAULTS.read_text())
