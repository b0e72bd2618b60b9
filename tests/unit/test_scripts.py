"""What a run of training scripts plans, and which versions of a script are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.planning import kept_or_new_plan
from bench.run_options import CommandOptions
from harness.cell.errors import UsageError
from harness.record.plan import Plan, require_named
from harness.record.store import Store


def planned(folder: Path, *scripts: str, **options: object) -> Plan:
    options |= {"scripts": scripts, "results": folder / "results"}
    given = CommandOptions(**options)  # type: ignore[arg-type]
    return kept_or_new_plan(Store(folder / "results"), given)[0]


@pytest.fixture
def train(tmp_path: Path) -> Path:
    file = tmp_path / "new" / "train.py"
    file.parent.mkdir()
    file.write_text("raise SystemExit('no rank starts it')\n")
    return file


def test_a_plan_has_a_cell_for_each_script_and_its_arguments(train: Path, tmp_path: Path) -> None:
    plan = planned(tmp_path, f"{train} --name 'a b'", str(train), settings=["batch=16"])
    assert [cell.label for cell in plan.cells] == ["new/train.py --name 'a b'", "new/train.py"]
    assert {cell.global_batch for cell in plan.cells} == {16}
    assert {cell.devices for cell in plan.cells} == {2}
    assert plan.trials == 5
    assert not plan.left_out


def test_mistakes_in_scripts_are_named(train: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file"):
        planned(tmp_path, "missing.py")
    with pytest.raises(UsageError, match="give a Python file"):
        planned(tmp_path, "train.sh")
    with pytest.raises(UsageError, match="give a Python file and its arguments"):
        planned(tmp_path, f"{train} --name 'a")
    with pytest.raises(UsageError, match="leave --matrix"):
        planned(tmp_path, str(train), matrix="smoke")
    left = planned(tmp_path, str(train), settings=["precision=bf16"]).left_out
    assert [out.reason for out in left] == ["a script sets its own precision: leave precision out"]


def test_versions_of_a_script_share_a_name(train: Path, tmp_path: Path) -> None:
    """Runs of two versions are compared by it (harness/analysis/compare.py)."""
    (before,) = planned(tmp_path, str(train)).cells
    train.write_text("raise SystemExit('still no rank')\n")
    (after,) = planned(tmp_path, str(train)).cells
    (other,) = planned(tmp_path, f"{train} --fast").cells
    assert before.id != after.id
    assert before.name == after.name != other.name


def test_a_script_that_only_results_name_is_not_run(train: Path, tmp_path: Path) -> None:
    plan = planned(tmp_path, f"{train} --fast")
    with pytest.raises(UsageError, match="only results name is not used"):
        require_named(plan.cells, ["", "matrix: smoke"])
    require_named(plan.cells, [f"{train} --fast"])
